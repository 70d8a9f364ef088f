// A library that loads and is not Halfwire's, for run_test.
extern "C" __attribute__((visibility("default"))) int somebodyElsesLibrary() { return 1; }
