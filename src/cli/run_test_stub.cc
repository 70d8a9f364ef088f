// Stands for libhalfwire.so where run_test is about starting processes: it loads and has the marker, and does
// nothing.
extern "C" __attribute__((visibility("default"))) const char* halfwire_version() { return "stub"; }
