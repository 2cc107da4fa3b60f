// Shared parts of the interfaces: a server's queue, its store of recent images, and the conversion of a request's
// fields to keys. Each interface is a file in this folder: its paths, its answers, and its error format.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "maxdiffusion/server/fields.h"
#include "maxdiffusion/server/http.h"
#include "maxdiffusion/server/job_queue.h"

namespace md {

/// An error with its HTTP status, answered in the interface's error format.
class Refusal : public Error {
 public:
  Refusal(int status, const std::string& message) : Error(Code::invalid_config, message), status_(status) {}
  int status() const { return status_; }

 private:
  int status_;
};

/// PNG files under unguessable names; keeps the newest, up to `most` bytes in total. Thread safe.
class ImageStore {
 public:
  explicit ImageStore(size_t most) : most_(most) {}
  /// Stores a file and returns its path, "/images/NAME.png".
  std::string put(std::string png);
  /// null if there is none.
  std::shared_ptr<const std::string> find(const std::string& path) const;

 private:
  size_t most_, size_ = 0;
  mutable std::mutex mutex_;
  std::deque<std::pair<std::string, std::shared_ptr<const std::string>>> images_;
};

class Service {
 public:
  /// `api_key`: empty: no key is needed.
  Service(std::vector<ServedModel> models, const ServeKeys& keys, std::string api_key);

  /// Answers any request.
  HttpReply reply(const HttpCall& call);

  /// Waits for the jobs of one request and returns their images in order. Cancels all of them if the client disconnects
  /// or one fails. Throws the jobs' errors; Refusal for cancelled ones.
  std::vector<GeneratedImage> await(const std::vector<JobQueue::Ticket>& jobs, const HttpCall& call);
  /// The PNG file of an image, with its parameters as text.
  static std::string png_of(const GeneratedImage& image);

  JobQueue queue;
  const ServeKeys keys;
  ImageStore images;
  std::mutex mutex;  // guards the members below
  /// The page's jobs by name, newest last.
  std::deque<std::pair<std::string, std::vector<JobQueue::Ticket>>> page_jobs;
  std::string default_model;  // sd_model_checkpoint of A1111's options
  int64_t default_clip_skip = 0;

 private:
  void check_access(const HttpCall& call) const;
  /// Whether pages of this origin, which is not the server's own, may use it.
  bool allows(const std::string& origin) const;
  HttpReply reply_or_error(const HttpCall& call);
  const std::string api_key_;
};

/// Status and message of an error for the client. Errors that are not the client's fault are only logged, since they
/// may name files of this machine.
std::pair<int, std::string> shown_to_client(const Error& e);

/// A name of 128 random bits.
std::string random_name();

struct Interface {
  bool (*takes)(const std::string& path);
  /// Throws Refusal and errors of the queue; 404 for unknown paths.
  HttpReply (*reply)(Service& service, const HttpCall& call);
  /// The body of an error.
  nlohmann::json (*error)(int status, const std::string& message);
};
Interface openai_interface();
Interface a1111_interface();
/// Training runs of the folder that the key `runs` names.
Interface runs_interface();
/// The page and its endpoints; matches all paths.
Interface page_interface();

// --- Helpers for interfaces ------------------------------------------------------------------------------------------

/// The JSON object in a body, without the fields that this path does not follow (sort_fields). Throws Refusal if there
/// is none, or for a field that is refused.
Fields json_fields(const HttpCall& call);
/// A value for messages: short, as JSON.
std::string shown_value(const nlohmann::json& value);
HttpReply json_reply(const nlohmann::json& value);
/// Removes a field and returns its value; `otherwise` if it is absent or null. Throws Refusal, naming it, for another
/// type.
template <class T>
T take(Fields& fields, const std::string& name, T otherwise);
/// Removes the field of a seed and returns it; none: absent, null or negative.
std::optional<Seed> take_seed(Fields& fields, const std::string& name);
/// Sets the request_keys() from fields with their names, removes these fields, and returns their names. Throws
/// invalid_config for an invalid value.
std::set<std::string> take_keys(Fields& fields, SampleRequest& request);
/// The warnings of the fields and of the jobs, each once.
std::vector<std::string> warnings_of(Service& service, const Fields& fields, const std::vector<JobQueue::Ticket>& jobs);
/// Decodes base64, or a data: URL of it. Throws Refusal, naming the field.
std::string bytes_of_text(const std::string& field, const std::string& text);
/// Decodes an image and blends it over white, u8 [H, W, 3]. Throws Refusal, naming the field.
HostArray image_of_bytes(const Service& service, const std::string& field, const std::string& bytes);
/// A mask that is white where the image is transparent; absent if nothing is transparent.
HostArray transparency_of_bytes(const Service& service, const std::string& field, const std::string& bytes);
/// Submits one job per image, with consecutive seeds; all or none. `set_keys`: as JobQueue::submit.
std::vector<JobQueue::Ticket> submit_each(Service& service, const std::string& model, const SampleRequest& request,
                                          const std::set<std::string>& set_keys, int64_t images);

}  // namespace md
