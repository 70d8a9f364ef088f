# The CUDA kernels, embedded as halfwire_kernels where nvcc is found, and what launches them.
target_sources(halfwire_wire PRIVATE cuda_codec.cc)
halfwire_test(cuda_arithmetic_test SOURCES cuda_arithmetic_test.cc cuda_codec_test.cc LIBS halfwire_wire LABELS quick)
if(HALFWIRE_NVCC)
  embed_fatbin(halfwire_wire kernels.cu halfwire_kernels)
  target_compile_definitions(halfwire_wire PUBLIC HALFWIRE_HAVE_KERNELS)
  add_subdirectory(cuda_check)
endif()
