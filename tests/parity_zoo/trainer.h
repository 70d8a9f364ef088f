// A small language model trained by four ranks in one process, with replicas, batches and random states of
// their own and a reduction between them; recorded through include/halfwire/parity.h. Every mistake that
// training programs are known to make can be switched on and is then really made: nothing is written into a
// record that did not happen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace halfwire::zoo {

inline constexpr size_t kWorld = 4;

enum class Optimizer { kSgd, kAdam };

// In which order the ranks' gradients are added. All of them are in use and none is wrong.
enum class Order { kRank, kReversed, kTree, kRing };

enum class Wire {
  kExact,
  kE4m3,            // blocks of 128 with an fp32 scale, to nearest, reduced by its owner, rounded again
  kE4m3TowardZero,  // the same, rounded toward zero: the mean of what is sent is too small
};

enum class Schedule {
  kWarmup,          // (step + 1) / warmup, then constant
  kWarmupFromZero,  // step / warmup: the first update is lost, on purpose or not
  kZeroThenOne,     // 0 at step 0, 1 after it
  kCosine,          // kWarmup, then down to a tenth
};

// What goes wrong. All off: a run without fault.
struct Mistakes {
  bool scheduler_before_optimizer = false;   // schedule.step() comes before optimizer.step()
  bool scheduler_every_micro_batch = false;  // and not once an update
  bool no_world_mean = false;                // gradients are added over ranks and not divided
  bool no_accumulation_mean = false;         // and over micro-batches
  bool no_reduction = false;                 // every rank uses the gradient of its own batches
  bool last_micro_batch_local = false;       // the last micro-batch is added after the reduction
  bool init_by_rank = false;                 // replicas begin with different parameters, none broadcast
  bool owner_keeps_exact = false;            // the owner of a shard keeps its sum and sends the rounded one
  bool order_by_rank = false;                // every rank adds in an order of its own
  bool optimizer_holds_copies = false;       // it was made before the model was copied to where it runs
  bool state_in_bf16 = false;                // Adam's moments
  bool clip_before_unscale = false;
  bool loader_restarts = false;      // a resumed run begins its epoch again
  bool loader_seeded_anew = false;   // a resumed run shuffles by another seed
  bool shuffle_from_shared = false;  // the order is drawn from a generator that others draw from too
  bool dropout_seed_shared = false;  // all ranks drop the same
  bool scaler_not_updated = false;   // scaler.update() is missing
  bool scaler_grows_fast = false;    // doubles after two good steps
  bool model_breaks = false;         // activations of one rank turn into NaN half-way and stay so
  bool bad_samples = false;          // one in 300 samples holds a NaN
  bool tie_broken_by_load = false;   // the checkpoint's two copies are loaded into two tensors
  bool tie_broken_live = false;      // the same half-way, in the running program
  bool tie_broken_by_wrap = false;   // the model is copied tensor by tensor before training
  bool params_cut = false;           // stored with ten bits of mantissa by dropping the rest: toward zero
  bool rate_tiny = false;            // 1e-4 of what was asked: nothing is learnt
};

struct Config {
  uint64_t seed = 1;
  size_t steps = 300;
  size_t samples = 16;  // of a rank in one update, split over the micro-batches
  size_t accumulation = 1;
  Optimizer optimizer = Optimizer::kAdam;
  double rate = 0.01;
  size_t warmup = 20;
  Schedule schedule = Schedule::kWarmup;
  double clip = 0;  // 0: not at all
  double dropout = 0;
  bool tied = true;
  bool scaler = false;  // gradients pass through fp16
  double first_scale = 65536;
  Order order = Order::kRank;
  Wire wire = Wire::kExact;
  size_t resume_at =
      0;  // 0: not at all; else a checkpoint is written before this step, everything thrown away, loaded
  Mistakes mistakes;
};

// Trains and records into `directory`. Empty, or what went wrong.
std::string train(const Config& config, const std::string& directory);

}  // namespace halfwire::zoo
