#include "abi/nccl.h"
#include "abi/nccl_layout.h"

namespace halfwire::abi {

const std::vector<size_t>& ownNcclLayout() {
  static const std::vector<size_t> layout = describeNcclLayout();
  return layout;
}

}  // namespace halfwire::abi
