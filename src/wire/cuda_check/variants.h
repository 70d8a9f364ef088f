// The shapes of the kernels that the check program compares in one run, each on both paths:
// X(threads, repeat or depth, hint, resident).
#pragma once

// Quantize: threads, repeat, LoadHint, resident threads.
#define HALFWIRE_QUANTIZE_VARIANTS(X) \
  X(128, 1, 0, 1280)                  \
  X(128, 2, 0, 1024)                  \
  X(256, 1, 0, 1280)                  \
  X(256, 1, 1, 1280)                  \
  X(256, 1, 0, 1536)                  \
  X(256, 2, 0, 768)                   \
  X(256, 2, 0, 1024)                  \
  X(256, 2, 1, 1024)                  \
  X(512, 1, 0, 1024)

// Dequantize: threads, repeat, unused, resident threads.
#define HALFWIRE_DEQUANTIZE_VARIANTS(X) \
  X(256, 1, 0, 1280)                    \
  X(256, 1, 0, 2048)                    \
  X(256, 2, 0, 1024)                    \
  X(512, 1, 0, 1024)                    \
  X(512, 2, 0, 1024)

// Reduce into a packet: threads, depth, LoadHint, resident threads.
#define HALFWIRE_REDUCE_VARIANTS(X) \
  X(64, 4, 1, 1024)                 \
  X(128, 2, 1, 1280)                \
  X(128, 4, 0, 1024)                \
  X(128, 4, 1, 1024)                \
  X(128, 4, 1, 768)                 \
  X(128, 8, 1, 768)                 \
  X(256, 4, 1, 1024)
