// What the stream executor asks of an accelerator. cuda_streams.h answers on CUDA; the tests answer in software, with
// queues that they empty in any order that the waits allow.
#pragma once

#include <cstdint>
#include <memory>

#include "executor.h"

namespace moe_opt {
namespace pipeline {

using Stream = int64_t;  // a name that the accelerator gives

// A point in a stream's work.
class Event {
 public:
  virtual ~Event() = default;
};

class Streams {
 public:
  virtual ~Streams() = default;

  virtual int num_lanes() const = 0;
  // Of a lane, which nobody else uses.
  virtual Stream of_lane(int lane) = 0;
  // On which the calling thread's work is queued.
  virtual Stream current() = 0;

  // The point behind all that is queued on the stream by now. Only a timed one has a time.
  virtual std::unique_ptr<Event> record(Stream stream, bool timed) = 0;
  // What is queued on the stream afterwards runs behind the event.
  virtual void wait(Stream stream, const Event& event) = 0;

  // Runs the action, which queues its work on the stream.
  virtual void enqueue(Stream stream, Action& action) = 0;
  // What is queued on the stream afterwards runs behind what the action has left running elsewhere.
  virtual void join(Stream stream, Action& action) = 0;

  // The host waits for all that is queued on the stream.
  virtual void synchronize(Stream stream) = 0;
  // Between two timed events that lie behind.
  virtual double seconds(const Event& from, const Event& to) = 0;
};

}  // namespace pipeline
}  // namespace moe_opt
