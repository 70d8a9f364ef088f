/* Nothing: what counts in libhalfwire-nccl.so are the libraries that it needs (handles.h). */
typedef int HalfwireFacade;
