// Implementation of remote_library.h: Arrow's S3FileSystem and GcsFileSystem. Source of the environment variables:
// AWS's "SDKs and tools reference"; Google's "application default credentials" and its C++ client's GetEmulator().
#include <arrow/buffer.h>
#include <arrow/filesystem/gcsfs.h>
#include <arrow/filesystem/s3fs.h>
#include <arrow/io/interfaces.h>
#include <arrow/util/thread_pool.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/storage/remote_library.h"

namespace md {
namespace {

namespace afs = arrow::fs;

constexpr int kRetries = 3;
constexpr double kPatience = 20;  // seconds: to connect, without a byte, and for all attempts with Google
constexpr int64_t kChunk = int64_t{8} << 20, kChunksInMemory = 4;  // of a file that is written

/// AWS's library decides which errors are retryable; this class sets attempts and delays.
class Retries : public afs::S3RetryStrategy {
 public:
  bool ShouldRetry(const AWSErrorDetail& error, int64_t attempted) override {
    return error.should_retry && attempted < kRetries;
  }
  int64_t CalculateDelayBeforeNextRetry(const AWSErrorDetail&, int64_t attempted) override {
    return int64_t{200} << attempted;
  }
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// The parts of "s3://user@bucket/a/b?query".
struct Place {
  std::string scheme, user, bucket, key, query;
  std::string path() const { return key.empty() ? bucket : bucket + "/" + key; }
};
Place place_of(const std::string& location) {
  const LocationParts p = split_location(location);
  Place out{.scheme = location.substr(0, 2), .query = p.query};
  std::string rest = p.path.substr(5);
  const size_t slash = std::min(rest.find('/'), rest.size()), at = rest.substr(0, slash).rfind('@');
  if (at != std::string::npos) out.user = rest.substr(0, at);
  out.bucket = rest.substr(at + 1, slash - at - 1);
  out.key = rest.substr(std::min(slash + 1, rest.size()));
  while (out.key.ends_with('/')) out.key.pop_back();
  check(!out.bucket.empty(), Code::io, "'{}': no bucket; expected {}://BUCKET/PATH", shown(location), out.scheme);
  return out;
}

/// Throws Arrow's error without secrets, with advice.
[[noreturn]] void refuse(const std::string& location, const arrow::Status& s) {
  const Place p = place_of(location);
  std::string text = s.message();
  text = text.substr(0, std::min(text.find('\n'), text.find(" error_info=")));
  const size_t colon = p.user.find(':');
  for (const std::string& secret :
       {p.user, colon == std::string::npos ? "" : p.user.substr(colon + 1), p.query, variable("AWS_SECRET_ACCESS_KEY"),
        variable("AWS_ACCESS_KEY_ID"), variable("AWS_SESSION_TOKEN")}) {
    for (size_t i; secret.size() > 3 && (i = text.find(secret)) != std::string::npos;)
      text.replace(i, secret.size(), "…");
  }
  const auto says = [&](std::initializer_list<const char*> words) {
    return std::ranges::any_of(words, [&](const char* w) { return text.find(w) != std::string::npos; });
  };
  Error e(Code::io, fmt::format("'{}': {}", shown(location), text));
  const std::string who =
      p.scheme == "s3" ? "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or ~/.aws; s3://anonymous@… for public buckets)"
                       : "GOOGLE_APPLICATION_CREDENTIALS (gs://anonymous@… for public buckets)";
  if (says({"NO_SUCH_BUCKET", "bucket does not exist", "Bucket does not exist"}) ||
      (says({"status 404", "NOT_FOUND", "Path does not exist"}) && p.key.empty())) {
    e.note(fmt::format("try: is '{}' the bucket's name?", p.bucket));
  } else if (says({"NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "status 404", "NOT_FOUND", "Path does not exist"})) {
    e.note(fmt::format("try: list bucket '{}'; it has no '{}'", p.bucket, p.key));
  } else if (says({"ACCESS_DENIED", "status 403", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ACCESS_KEY",
                   "SIGNATURE", "status 401", "credentials"})) {
    e.note("try: set the credentials: " + who);
  } else {
    e.note(fmt::format("after several attempts; try: is the network up, and {} right?",
                       p.scheme == "s3" ? "AWS_ENDPOINT_URL (or endpoint_override=… behind the path)"
                                        : "STORAGE_EMULATOR_HOST (or endpoint_override=… behind the path)"));
  }
  throw e;
}

template <class T>
T require(arrow::Result<T> r, const std::string& location) {
  if (!r.ok()) refuse(location, r.status());
  return std::move(r).ValueUnsafe();
}
void require(const arrow::Status& s, const std::string& location) {
  if (!s.ok()) refuse(location, s);
}

/// Splits off "?retry_limit_seconds=2", which Arrow only supports for Google: the query without it, and the seconds.
std::pair<std::string, double> without_patience(const std::string& query) {
  constexpr std::string_view kName = "retry_limit_seconds=";
  const size_t at = query.find(kName);
  if (at == std::string::npos) return {query, kPatience};
  const size_t end = std::min(query.find('&', at), query.size());
  const double seconds = std::strtod(query.c_str() + at + kName.size(), nullptr);
  // Also removes the separator before it; if it was the first of several, the next separator becomes '?'.
  std::string rest = query.substr(0, at - 1) + query.substr(end);
  if (rest.starts_with('&')) rest[0] = '?';
  return {rest, seconds > 0 ? seconds : kPatience};
}

class RemoteFile : public InputFile {
 public:
  RemoteFile(std::string location, std::shared_ptr<afs::FileSystem> fs, afs::FileInfo info)
      : location_(std::move(location)), name_(shown(location_)), fs_(std::move(fs)), info_(std::move(info)) {}
  const std::string& name() const override { return name_; }
  int64_t size() const override { return info_.size(); }
  Blob read(int64_t offset, int64_t n) const override {
    check(offset >= 0 && n >= 0 && offset <= size() && n <= size() - offset, Code::io,
          "{}: the file is truncated: bytes {} to {} of {} are needed", name_, offset, offset + n, size());
    if (n == 0) return {};
    // Reads a whole file with one request. For ranges, Arrow's GCS filesystem first queries the file and opens an
    // unused stream.
    const auto buffer = n == size() ? require(require(fs_->OpenInputStream(info_), location_)->Read(n), location_)
                                    : require(ranges()->ReadAt(offset, n), location_);
    check(buffer->size() == n, Code::io, "{}: {} bytes came at {}; expected {}: did the file change?", name_,
          buffer->size(), offset, n);
    return {buffer, std::string_view(*buffer)};
  }
  bool local() const override { return false; }

 private:
  std::shared_ptr<arrow::io::RandomAccessFile> ranges() const {
    const std::lock_guard lock(mutex_);
    if (!ranges_) ranges_ = require(fs_->OpenInputFile(info_), location_);
    return ranges_;
  }
  std::string location_, name_;
  std::shared_ptr<afs::FileSystem> fs_;
  afs::FileInfo info_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<arrow::io::RandomAccessFile> ranges_;
};

class Library : public RemoteLibrary {
 public:
  std::vector<FoundFile> list(const std::string& location, bool must_exist) const override {
    const Place p = place_of(location);
    const auto fs = system_of(location);
    std::vector<afs::FileInfo> infos;
    // Lists a bucket directly, because permission to read files may not include the bucket's metadata.
    const auto info = p.key.empty() ? afs::FileInfo(p.path(), afs::FileType::Directory)
                                    : require(fs->GetFileInfo(p.path()), location);
    if (info.type() == afs::FileType::NotFound) {
      if (must_exist) refuse(location, arrow::Status::IOError("NOT_FOUND"));
    } else if (info.IsFile()) {
      infos.push_back(info);
    } else {
      afs::FileSelector below;
      below.base_dir = p.path();
      below.recursive = true;
      below.allow_not_found = !must_exist;
      infos = require(fs->GetFileInfo(below), location);
    }
    std::vector<FoundFile> out;
    const std::string before = p.scheme + "://" + (p.user.empty() ? "" : p.user + "@");
    for (const afs::FileInfo& i : infos) {
      if (i.IsFile()) out.push_back({before + i.path() + p.query, i.size(), i.mtime().time_since_epoch().count()});
    }
    return out;
  }

  std::shared_ptr<const InputFile> open(const std::string& location, int64_t size) const override {
    auto fs = system_of(location);
    afs::FileInfo info(place_of(location).path(), afs::FileType::File);
    info.set_size(size);
    if (size < 0) info = require(fs->GetFileInfo(info.path()), location);
    if (!info.IsFile()) refuse(location, arrow::Status::IOError("NOT_FOUND"));
    return std::make_shared<RemoteFile>(location, std::move(fs), std::move(info));
  }

  void write(const std::string& location, int64_t size, const Source& source) const override {
    const auto fs = system_of(location);
    const auto out = require(fs->OpenOutputStream(place_of(location).path(), nullptr), location);
    try {
      for (int64_t at = 0, chunks = 1; at < size; ++chunks) {
        std::string bytes = source(at, std::min(kChunk, size - at));
        at += std::ssize(bytes);
        require(out->Write(arrow::Buffer::FromString(std::move(bytes))), location);
        if (chunks % kChunksInMemory == 0) require(out->Flush(), location);  // waits for parts that are being uploaded
      }
      require(out->Close(), location);
    } catch (...) {
      if (place_of(location).scheme == "s3") {
        if (!out->closed()) (void)out->Abort();
      } else {
        // Destroying or aborting Arrow's GCS stream would create a file of the bytes sent so far.
        const std::lock_guard lock(mutex_);
        abandoned_.push_back(out);
      }
      throw;
    }
  }

  void copy(const std::string& from, const std::string& to) const override {
    require(system_of(to)->CopyFile(place_of(from).path(), place_of(to).path()), to);
  }

  void remove(const std::string& location) const override {
    const auto fs = system_of(location);
    const std::string path = place_of(location).path();
    const arrow::Status s = fs->DeleteFile(path);
    if (!s.ok() && require(fs->GetFileInfo(path), location).IsFile()) refuse(location, s);
  }

  void remove_folder(const std::string& location) const override {
    const auto fs = system_of(location);
    const Place p = place_of(location);
    check(!p.key.empty(), Code::internal, "'{}': it is a whole bucket; expected a folder in it", shown(location));
    const arrow::Status s = fs->DeleteDir(p.path());
    if (!s.ok() && !list(location, false).empty()) refuse(location, s);
  }

  void close() override {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    systems_.clear();
    (void)afs::EnsureS3Finalized();
  }

 private:
  /// One filesystem for each bucket and its credentials.
  std::shared_ptr<afs::FileSystem> system_of(const std::string& location) const {
    const Place p = place_of(location);
    const std::string root =
        fmt::format("{}://{}{}{}", p.scheme, p.user.empty() ? "" : p.user + "@", p.bucket, p.query);
    const std::lock_guard lock(mutex_);
    check(!closed_, Code::internal, "'{}': opened after the program closed its object stores", shown(location));
    set_up();
    auto& fs = systems_[root];
    if (!fs) fs = p.scheme == "s3" ? s3(p, location) : gcs(p, location);
    return fs;
  }

  static std::shared_ptr<afs::FileSystem> s3(const Place& p, const std::string& location) {
    if (!afs::IsS3Initialized()) {
      auto global = afs::S3GlobalOptions::Defaults();
      global.install_sigpipe_handler = true;  // a lost connection must not end the program
      require(afs::InitializeS3(global), location);
    }
    const bool anonymous = p.user == "anonymous";
    const auto [query, patience] = without_patience(p.query);
    const std::string root =
        fmt::format("s3://{}{}{}", p.user.empty() || anonymous ? "" : p.user + "@", p.bucket, query);
    auto options = require(afs::S3Options::FromUri(root), location);
    if (anonymous) options.ConfigureAnonymousCredentials();
    options.retry_strategy = std::make_shared<Retries>();
    options.connect_timeout = options.request_timeout = patience;
    options.allow_delayed_open = true;  // small files are one request
    return require(afs::S3FileSystem::Make(options), location);
  }

  static std::shared_ptr<afs::FileSystem> gcs(const Place& p, const std::string& location) {
    std::string emulator = variable("CLOUD_STORAGE_EMULATOR_ENDPOINT");
    if (emulator.empty()) emulator = variable("STORAGE_EMULATOR_HOST");
    const bool anonymous = p.user.empty() && !emulator.empty();
    const std::string root = fmt::format("gs://{}{}{}",
                                         anonymous        ? "anonymous@"
                                         : p.user.empty() ? ""
                                                          : p.user + "@",
                                         p.bucket, p.query);
    auto options = require(afs::GcsOptions::FromUri(root, nullptr), location);
    if (!emulator.empty() && options.endpoint_override.empty()) {
      const size_t scheme = emulator.find("://");
      options.scheme = scheme == std::string::npos ? "http" : emulator.substr(0, scheme);
      options.endpoint_override = scheme == std::string::npos ? emulator : emulator.substr(scheme + 3);
      while (options.endpoint_override.ends_with('/')) options.endpoint_override.pop_back();
    }
    if (!options.retry_limit_seconds) options.retry_limit_seconds = kPatience;
    return require(afs::GcsFileSystem::Make(options), location);
  }

  /// The wheel's libraries look for certificates at their build's path; Debian has them at another one.
  static void set_up() {
    static const bool once = [] {
      afs::FileSystemGlobalOptions options;
      struct stat s {};
      for (const std::string& file : {variable("SSL_CERT_FILE"), std::string("/etc/ssl/certs/ca-certificates.crt"),
                                      std::string("/etc/pki/tls/certs/ca-bundle.crt")}) {
        if (options.tls_ca_file_path.empty() && ::stat(file.c_str(), &s) == 0) options.tls_ca_file_path = file;
      }
      return afs::Initialize(options).ok();
    }();
    (void)once;
  }

  mutable std::mutex mutex_;
  mutable std::map<std::string, std::shared_ptr<afs::FileSystem>> systems_;
  mutable std::vector<std::shared_ptr<arrow::io::OutputStream>> abandoned_;
  bool closed_ = false;
};

}  // namespace
}  // namespace md

extern "C" md::RemoteLibrary* md_remote_library() { return new md::Library; }
