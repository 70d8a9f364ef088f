// Whether a job's sizes, addresses and pitches are ones that the codecs accept. Both devices ask before they
// enqueue, so that a wrong job is an error of the call and not a fault on the stream.
#pragma once

#include "base/status.h"
#include "wire/codec.h"
#include "wire/compare.h"
#include "wire/perturb.h"

namespace halfwire {

// Ok, or kInvalidArgument with the sentence that names the field. Reads no element.
Status checkJob(const QuantizeJob& job);
Status checkJob(const DequantizeJob& job);
Status checkJob(const ReduceJob& job);
Status checkJob(const PerturbJob& job);
Status checkJob(const CompareJob& job);

}  // namespace halfwire
