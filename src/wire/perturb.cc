#include "wire/perturb.h"

namespace halfwire {
namespace {

template <class Bits>
void perturbAll(const PerturbJob& job) {
  auto* data = static_cast<Bits*>(job.data);
  const PerturbStep step = perturbStep(job.type);
  for (uint64_t i = 0; i < job.elements; ++i)
    data[i] = static_cast<Bits>(perturbed(data[i], step, job.seed, i));
}

}  // namespace

void perturb(const PerturbJob& job) {
  job.type == DataType::kFp32 ? perturbAll<uint32_t>(job) : perturbAll<uint16_t>(job);
}

}  // namespace halfwire
