#include "trace/comm_patterns.h"

#include <gtest/gtest.h>

namespace halfwire::trace {
namespace {

CommPatterns::Match classify(std::string_view name) {
  static const CommPatterns patterns = CommPatterns::create({}).value();
  return patterns.classify(name);
}

TEST(CommPatterns, KnowsTheFamilies) {
  struct Case {
    const char* name;
    Collective type;
    ElementType element;
  };
  for (const Case& c : {
           Case{"ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
                Collective::kAllReduce, ElementType::kBf16},
           Case{"ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", Collective::kAllReduce,
                ElementType::kFp32},
           Case{"ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", Collective::kSendRecv,
                ElementType::kUnknown},
           Case{"ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", Collective::kBroadcast,
                ElementType::kUnknown},
           Case{"ncclDevKernel_ReduceScatter_Sum_f16_RING_LL(x)", Collective::kReduceScatter,
                ElementType::kFp16},
           Case{"ncclDevKernel_AllGather_RING_LL(x)", Collective::kAllGather, ElementType::kUnknown},
           Case{"ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", Collective::kGeneric,
                ElementType::kUnknown},
           Case{"ncclSymkDevKernel_AllReduce_RSxLD_AGxST(x)", Collective::kAllReduce, ElementType::kUnknown},
           Case{"void deep_ep::internode::dispatch<false, 8, true>(int4*)", Collective::kDispatch,
                ElementType::kUnknown},
           Case{"void deep_ep::intranode::combine<__nv_bfloat16, 8>(x)", Collective::kCombine,
                ElementType::kBf16},
           Case{"multimem_all_reduce_kernel<c10::BFloat16>", Collective::kAllReduce, ElementType::kBf16},
           Case{"void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>", Collective::kAllReduce,
                ElementType::kUnknown},
           Case{"void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)", Collective::kAllReduce,
                ElementType::kBf16},
           Case{"void flashinfer::trtllm_allreduce_fusion::kernel", Collective::kAllReduce,
                ElementType::kUnknown},
           Case{"nvshmemi_barrier_all_kernel", Collective::kBarrier, ElementType::kUnknown},
       }) {
    const auto m = classify(c.name);
    EXPECT_EQ(m.kind, ActivityKind::kComm) << c.name;
    EXPECT_EQ(collectiveName(m.type), std::string(collectiveName(c.type))) << c.name;
    EXPECT_EQ(elementName(m.element), std::string(elementName(c.element))) << c.name;
  }
}

TEST(CommPatterns, LeavesComputeAlone) {
  for (const char* name :
       {"ampere_bf16_s16816gemm", "void at::native::reduce_kernel<512, 1>(x)", "",
        "void deep_ep::layout::get_dispatch_layout<256>(x)", "triton_poi_fused_gather_scatter_0",
        "void at::native::_scatter_gather_elementwise_kernel"}) {
    EXPECT_EQ(classify(name).kind, ActivityKind::kCompute) << name;
  }
}

TEST(CommPatterns, HalfwiresOwnKernelsAreCodec) {
  EXPECT_EQ(classify("void halfwire::quantize<bf16>(x)").kind, ActivityKind::kCodec);
}

TEST(CommPatterns, UsersAddTheirs) {
  const CommPatterns p = CommPatterns::create({"my_a2a.*=all_to_all", "RingAttentionSend"}).value();
  EXPECT_EQ(p.classify("void MY_A2A_kernel<float>(x)").type, Collective::kAllToAll);
  EXPECT_EQ(p.classify("void ringattentionsend<1>").kind, ActivityKind::kComm);
  EXPECT_EQ(p.classify("gemm").kind, ActivityKind::kCompute);
  for (const char* bad : {"(", "", "[a"}) {
    EXPECT_EQ(CommPatterns::create({bad}).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace halfwire::trace
