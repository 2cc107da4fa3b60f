// A queue of requests from many clients for the models of one process, and one worker thread that owns the devices.
// Waiting requests with the same model, size and settings are sampled together, up to the batch size of the key
// per_device_batch_size. Thread safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/pipelines/pipeline.h"
#include "maxdiffusion/server/serve_keys.h"
#include "maxdiffusion/settings/key_rules.h"

namespace md {

struct ServedModel {
  std::string name;         // name in requests
  std::string model;        // as for DiffusionPipeline::load
  PipelineOptions options;  // with keep_loaded
  SampleRequest defaults;   // values of fields that a request lacks
  std::string lora_dir;     // folder of <lora:name:scale> in prompts; empty: none
  KeyRules rules;           // of the config: which keys of a request have no effect
};

/// An error that is not the client's fault: a full queue (429), a stopping server (503).
class Unavailable : public Error {
 public:
  Unavailable(int status, std::string message) : Error(Code::device, std::move(message)), status_(status) {}
  int status() const { return status_; }

 private:
  int status_;
};

struct GeneratedImage {
  HostArray rgb;  // u8 [H, W, 3]
  std::string parameters;
  uint64_t seed = 0;
};

enum class JobState { waiting, running, done, failed, cancelled };
struct JobStatus {
  JobState state = JobState::waiting;
  int64_t ahead = 0;            // number of jobs that wait before it
  int64_t step = 0, steps = 0;  // of a running job; 0: not yet known
  /// PNG file of the first image as the model predicts it, with preview_every; null: none yet, or the job has ended.
  std::shared_ptr<const std::string> preview;
  std::shared_ptr<const Error> error;  // if failed
  std::vector<GeneratedImage> images;  // if done
  std::vector<std::string> warnings;   // of this request, as `generate` logs them; complete if done
  bool ended() const { return state != JobState::waiting && state != JobState::running; }
};

/// A seed in the range that other programs accept. Thread safe.
Seed random_seed();

class JobQueue {
 public:
  struct Job;
  using Ticket = std::shared_ptr<Job>;

  /// Loads all models. Throws invalid_config if two have the same name, and as DiffusionPipeline::load
  /// does.
  JobQueue(std::vector<ServedModel> models, const ServeKeys& limits);
  ~JobQueue();

  /// Longest side of an image or a sample: four times that of a square of max_pixels.
  static int64_t most_side(const ServeKeys& limits);
  std::vector<std::string> models() const;
  /// The model of this name; empty: the first. Throws invalid_config, listing the names, for an unknown name.
  const ServedModel& model(const std::string& name) const;
  const Family& family(const std::string& name) const;
  /// Whether its scheduler_config.json is of a flow-matching model.
  bool is_flow_matching(const std::string& name) const;
  /// Names of the LoRA files that prompts may use.
  std::vector<std::string> loras(const std::string& model) const;

  /// Appends a request; all of its images are sampled or none. Throws invalid_config if the model does not support it,
  /// a limit is exceeded, or a LoRA file is missing; Unavailable if the queue is full or the server stops. `set_keys`:
  /// the keys that the client sets; the job's warnings name those without effect.
  Ticket submit(const std::string& model, SampleRequest request, const std::set<std::string>& set_keys = {});
  JobStatus status(const Ticket& job);
  /// Waits until the job's status changes or the job ends, or until the milliseconds have passed.
  void wait(const Ticket& job, int64_t milliseconds);
  void cancel(const Ticket& job);
  /// Cancels running jobs; `all`: also waiting ones.
  void interrupt(bool all);
  /// Status of the running jobs; `waiting` if none runs.
  JobStatus running();
  int64_t waiting();

  /// Accepts no more jobs: waiting ones fail with Unavailable, running ones are cancelled.
  void stop();

 private:
  struct Model;
  Model& find(const std::string& name) const;
  void work();
  std::vector<Ticket> next();
  void generate(const std::vector<Ticket>& jobs);
  void end(Job& job, JobState state, std::shared_ptr<const Error> error = nullptr);

  ServeKeys limits_;
  std::vector<std::unique_ptr<Model>> models_;
  mutable std::mutex mutex_;
  std::condition_variable submitted_, changed_;
  std::deque<Ticket> waiting_;
  std::vector<Ticket> running_;
  bool stopped_ = false;
  std::thread worker_;
};

}  // namespace md
