// Golden packets: inputs, the packets they become, sums of packets and what all of them decode to, for every
// format and data type. testdata/golden.json holds them; every implementation of the wire format must
// reproduce them.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace halfwire {

// Works all cases out with the reference. The layout of the document is described in its "layout" member.
nlohmann::json makeGolden();

}  // namespace halfwire
