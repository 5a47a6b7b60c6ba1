// mlpo_cuda and mlpo_cuda_slot: a client's CUDA side, its slots, and the thread that sees to it that streams go on.
//
// Locks, in the order in which they are taken: a slot's, the side's, the client library's. A slot's may be held across
// calls to CUDA, which may block while a stream's queue is full; the side's never is, since the releaser takes it: a
// stream that is waited for here may itself wait for what the releaser does.
//
// The releaser. While a stream waits for an update, it takes completions in (mlpo_client_await); the client library
// then moves the slot's word, which the stream watches. It also ends requests of gradients whose copies CUDA will never
// finish.
#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "client/cuda/pins.h"
#include "client/cuda/runtime.h"
#include "client/src/lock.h"
#include "mlpo/client.h"
#include "mlpo/cuda.h"

namespace mlpo::cuda {

// A gradient on its way: from the submission of its copies until the stream has called back.
struct GradCopy {
  enum State : int { kCopying, kPosting, kPosted, kAbandoned };

  mlpo_request* request = nullptr;  // the post's: alive until then
  mlpo_cuda_slot* slot = nullptr;
  cudaEvent_t passed = nullptr;  // behind the call-back
  // The stream's call-back and the releaser both want to end it: who moves it from kCopying does.
  std::atomic<int> state{kCopying};  // acq_rel
  bool over = false;                 // of an abandoned one: the device is past it, or done for; the releaser's
};

// Host memory that the device can read, in words for slots.
struct WordPage {
  uint64_t* words = nullptr;
  uintptr_t device = 0;
};

}  // namespace mlpo::cuda

struct mlpo_cuda_slot {
  mlpo_cuda* side = nullptr;
  mlpo_subgroup* subgroup = nullptr;
  struct mlpo_subgroup_info info = {};  // what does not change of it
  uint32_t grad_bytes = 0;              // of an element
  uint32_t param_bytes = 0;
  uint64_t* word = nullptr;   // counts updates that have ended; on a WordPage, else `own_word`
  uintptr_t word_device = 0;  // its address for the device, 0: streams cannot wait for it
  uint64_t own_word = 0;

  mlpo::client::Mutex lock;
  std::vector<cudaEvent_t> readers;  // behind what reads the slot's parameters; guarded by lock
  // Behind all that mlpo_cuda_write_grad has put on streams; nullptr if that has passed. Each write follows the ones
  // before, so that one event does. Guarded by lock.
  cudaEvent_t written = nullptr;

  // Guarded by the side's lock.
  uint64_t awaited = 0;  // the highest value that a stream waits for
  uint32_t copies = 0;   // GradCopies that are not done with

  uint64_t Ended() const { return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire); }
};

struct mlpo_cuda {
  mlpo_client* client = nullptr;
  pid_t creator = 0;
  int device = 0;
  bool no_pin = false;
  bool stream_waits = false;
  mlpo::cuda::StreamWait wait;
  mlpo::cuda::ArenaPins pins;

  mlpo::client::Mutex lock;
  mlpo::client::Condition changed;
  bool stop = false;
  std::vector<mlpo_cuda_slot*> slots;
  std::vector<mlpo_cuda_slot*> waiting;  // slots whose word is below `awaited`, perhaps
  std::vector<mlpo::cuda::GradCopy*> copies;
  std::vector<cudaEvent_t> events;  // to be used again
  std::vector<mlpo::cuda::WordPage> pages;
  std::vector<uint32_t> free_words;  // index of the page * words of a page + word
  pthread_t releaser = {};
  bool releaser_runs = false;

  int CheckProcess() const;
  // An event that is in no use; cudaSuccess or why there is none.
  cudaError_t TakeEvent(cudaEvent_t* event);
  void GiveEvent(cudaEvent_t event);
  // The releaser takes care from now on.
  void Watch(mlpo::cuda::GradCopy* copy);
  void Await(mlpo_cuda_slot* slot, uint64_t value);
  void Release();  // the releaser's thread
  // Frees copies that have ended; lock held. Only the releaser does.
  void DropEnded();
  // Ends copies that CUDA will not finish.
  void CheckCopies();
  // Gives the slot a word that streams can wait for; false if none is free.
  bool TakeWord(mlpo_cuda_slot* slot);
  // More words; false if CUDA has no memory for them.
  bool AddPage();
};
