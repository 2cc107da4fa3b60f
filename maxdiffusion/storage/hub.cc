#include "maxdiffusion/storage/hub.h"

#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/percent_encoding.h"
#include "maxdiffusion/storage/http_library.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr int kAttempts = 6;        // without receiving a byte between them
constexpr int64_t kPatience = 300;  // longest accepted Retry-After, in seconds
constexpr auto kReportEvery = std::chrono::seconds(10);

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string hub_home() {
  if (std::string home = variable("HF_HOME"); !home.empty()) return home;
  if (std::string cache = variable("XDG_CACHE_HOME"); !cache.empty()) return cache + "/huggingface";
  const std::string home = variable("HOME");
  return home.empty() ? "" : home + "/.cache/huggingface";
}

std::string endpoint() {
  std::string url = variable("HF_ENDPOINT");
  if (url.empty()) url = "https://huggingface.co";
  while (url.ends_with('/')) url.pop_back();
  return url;
}

std::string without_space(std::string s) {
  while (!s.empty() && std::isspace(static_cast<unsigned char>(s.back()))) s.pop_back();
  return s;
}

std::string& token_override() {
  static std::string token;
  return token;
}
std::mutex& token_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::string page_of(const HubName& n) {
  return endpoint() + "/" + (n.kind == "datasets" ? "datasets/" : "") + n.repository;
}
std::string shown(const HubName& n) {
  return n.revision.empty() || n.revision == "main" ? n.repository : n.repository + "@" + n.revision;
}

/// The error for an unsuccessful response, with advice.
Error refusal(const HubName& n, const std::string& what, const HttpAnswer& a) {
  const auto code = a.headers.find("x-error-code");
  const std::string kind = code == a.headers.end() ? "" : code->second;
  const std::string text = fmt::format("download '{}': {}: ", shown(n), what);
  if (a.status == 0)
    return Error(Code::io, text + a.failure)
        .note(fmt::format("try: the same command, which resumes the download; is {} reachable from this machine?",
                          endpoint()));
  if (kind == "GatedRepo" || (a.status == 403 && kind.empty()))
    return Error(Code::io, text + fmt::format("status {}: access is restricted", a.status))
        .note(fmt::format("try: visit {} and accept its terms, then give a token of that account (HF_TOKEN)",
                          page_of(n)));
  if (kind == "RevisionNotFound")
    return Error(Code::io, text + fmt::format("there is no revision '{}'", n.revision)).note("try: revision=main");
  if (a.status == 401 && hub_token().empty())
    return Error(Code::io, text + "status 401: no such repository, or it needs a token")
        .note(fmt::format("try: check the name at {}; for a private or gated one set HF_TOKEN=… or hf_access_token=…",
                          page_of(n)));
  if (a.status == 401)
    return Error(Code::io, text + "status 401: the token is not accepted").note("try: a valid token in HF_TOKEN");
  if (a.status == 404)
    return Error(Code::io, text + "status 404: it does not exist").note(fmt::format("try: look at {}", page_of(n)));
  return Error(Code::io, text + fmt::format("status {}{}", a.status,
                                            a.error_body.empty() ? "" : ": " + a.error_body.substr(0, 200)));
}

/// Waits before the next attempt. Throws Interrupted on a signal.
void wait_seconds(int64_t seconds) {
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  while (Clock::now() < end) {
    check_interrupt("downloading");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

bool may_pass(const HttpAnswer& a) { return a.status == 0 || a.status == 408 || a.status == 429 || a.status >= 500; }

/// Seconds until the next attempt.
int64_t pause_of(const HttpAnswer& a, int attempt) {
  const auto after = a.headers.find("retry-after");
  if (after != a.headers.end() && !after->second.empty() && std::isdigit(static_cast<unsigned char>(after->second[0])))
    return std::min<int64_t>(std::strtoll(after->second.c_str(), nullptr, 10), kPatience);
  return a.status == 0 && attempt == 1 ? 0 : int64_t{1} << std::min(attempt - 1, 5);
}

/// GET of a short text, with several attempts.
std::string get_text(const HubName& n, const std::string& url, const std::string& what) {
  constexpr size_t kMost = 64 << 20;
  for (int attempt = 1;; ++attempt) {
    std::string text;
    const HttpAnswer a = http_library().get({.url = url, .token = hub_token()}, [&](int64_t, std::string_view bytes) {
      check_interrupt("downloading");
      text += bytes;
      return text.size() <= kMost;
    });
    if (a.status == 200) return text;
    const int most = a.status == 0 ? 2 : kAttempts;  // fail early if the host is unreachable
    if (!may_pass(a) || attempt >= most) throw refusal(n, what, a);
    const int64_t pause = pause_of(a, attempt);
    if (pause > 1) log_info("the hub replied {}; retrying in {} s", a.status, pause);
    wait_seconds(pause);
  }
}

struct Listing {
  std::string commit;
  std::vector<HubFile> files;
};

/// A path within a snapshot, without "..".
bool is_safe(const std::string& path) {
  if (path.empty() || path[0] == '/' || path.find('\0') != path.npos) return false;
  for (const fs::path& part : fs::path(path))
    if (part == ".." || part == "." || part.empty()) return false;
  return true;
}
bool is_hex(const std::string& s, size_t size) {
  return s.size() == size && s.find_first_not_of("0123456789abcdef") == s.npos;
}

Listing list_repository(const HubName& n) {
  const std::string revision = n.revision.empty() ? "main" : n.revision;
  const json j = parse_json_or_discard(get_text(
      n,
      fmt::format("{}/api/{}/{}/revision/{}?blobs=true", endpoint(), n.kind, n.repository, percent_encoded(revision)),
      "its list of files"));
  const auto text = [](const json& o, const char* name) {
    const auto it = o.find(name);  // end() if it is not an object
    return it != o.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  Listing out;
  check(j.is_object() && is_hex(text(j, "sha"), 40) && j.contains("siblings") && j["siblings"].is_array(), Code::io,
        "download '{}': the answer of {} is not a list of files", shown(n), endpoint());
  out.commit = text(j, "sha");
  for (const json& s : j["siblings"]) {
    HubFile f{.path = text(s, "rfilename"), .size = -1, .sha256 = "", .git_sha1 = text(s, "blobId")};
    if (const auto size = s.find("size"); size != s.end() && size->is_number_integer()) f.size = size->get<int64_t>();
    if (const auto lfs = s.find("lfs"); lfs != s.end() && lfs->is_object()) f.sha256 = text(*lfs, "sha256");
    check(is_safe(f.path) && f.size >= 0 && (f.sha256.empty() ? is_hex(f.git_sha1, 40) : is_hex(f.sha256, 64)),
          Code::io, "download '{}': the list of {} names the file '{}' without size and digest", shown(n), endpoint(),
          f.path);
    out.files.push_back(std::move(f));
  }
  return out;
}

const std::string& name_of_blob(const HubFile& f) { return f.sha256.empty() ? f.git_sha1 : f.sha256; }

std::string digest_of(const std::string& file, const HubFile& f) {
  const std::unique_ptr<Digest> digest = http_library().digest(f.sha256.empty() ? "sha1" : "sha256");
  if (f.sha256.empty()) digest->add(fmt::format("blob {}", f.size) + '\0');
  if (f.size > 0) {
    const MappedFile m = map_file(file);
    constexpr size_t kStep = 8 << 20;
    for (size_t at = 0; at < m.size; at += kStep) {
      check_interrupt("checking a download");
      digest->add({reinterpret_cast<const char*>(m.data) + at, std::min(kStep, m.size - at)});
    }
  }
  return digest->hex();
}

/// Lock of a blob during its download: the lock file of huggingface_hub.
class BlobLock {
 public:
  explicit BlobLock(const std::string& file) {
    make_folders(fs::path(file).parent_path());
    fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    check(fd_ >= 0, Code::io, "open '{}': {}", file, std::strerror(errno));
    for (bool logged = false; ::flock(fd_, LOCK_EX | LOCK_NB) != 0; logged = true) {
      if (!logged) log_info("another process downloads the same file; waiting for it");
      wait_seconds(1);
    }
  }
  ~BlobLock() { ::close(fd_); }
  BlobLock(const BlobLock&) = delete;
  BlobLock& operator=(const BlobLock&) = delete;

 private:
  int fd_;
};

std::string bytes_text(int64_t bytes) {
  return bytes >= 1'000'000'000 ? fmt::format("{:.2f} GB", static_cast<double>(bytes) / 1e9)
         : bytes >= 1'000'000   ? fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6)
                                : fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3);
}

/// Logs the progress of a download every ten seconds.
class Progress {
 public:
  Progress(std::string title, int64_t done, int64_t total)
      : title_(std::move(title)), start_done_(done), done_(done), total_(total) {}
  void add(int64_t bytes) {
    done_ += bytes;
    if (Clock::now() - last_ < kReportEvery) return;
    last_ = Clock::now();
    const double rate =
        static_cast<double>(done_ - start_done_) / std::chrono::duration<double>(last_ - start_).count();
    const auto left = static_cast<int64_t>(static_cast<double>(total_ - done_) / std::max(rate, 1.0));
    log_info("{}: {} of {}, {}/s, {}:{:02} left", title_, bytes_text(done_), bytes_text(total_),
             bytes_text(static_cast<int64_t>(rate)), left / 60, left % 60);
  }

 private:
  std::string title_;
  int64_t start_done_, done_, total_;
  Clock::time_point start_ = Clock::now(), last_ = start_;
};

int64_t size_of_file(const std::string& path) {
  std::error_code ec;
  const auto size = fs::file_size(path, ec);
  return ec ? 0 : static_cast<int64_t>(size);
}

void download_blob(const HubName& n, const std::string& commit, const HubFile& f, Progress& progress) {
  const std::string entry = cache_entry(n), blob = entry + "/blobs/" + name_of_blob(f), part = blob + ".incomplete";
  const BlobLock lock(fs::path(entry).parent_path().string() + "/.locks/" + fs::path(entry).filename().string() + "/" +
                      name_of_blob(f) + ".lock");
  if (exists(blob)) return;
  const std::string url = page_of(n) + "/resolve/" + commit + "/" + percent_encoded(f.path);
  bool damaged = false;
  int64_t most = size_of_file(part);
  for (int attempt = 1;; ++attempt) {
    int64_t have = size_of_file(part);
    if (have > f.size) {
      fs::remove(part);
      have = 0;
    }
    HttpAnswer a{.status = 200};
    if (have < f.size || f.size == 0) {
      const int64_t before = have;
      auto writer = std::make_unique<FileWriter>(part, FileWriter::Open::append);
      bool too_long = false;
      a = http_library().get({.url = url, .token = hub_token(), .offset = have},
                             [&](int64_t status, std::string_view bytes) {
                               check_interrupt("downloading");
                               if (status == 200 && have == before && before > 0) {  // server without ranges
                                 writer = std::make_unique<FileWriter>(part, FileWriter::Open::truncate);
                                 progress.add(-before);
                                 have = 0;
                               }
                               too_long = have + static_cast<int64_t>(bytes.size()) > f.size;
                               if (too_long) return false;
                               writer->write(bytes.data(), bytes.size());
                               have += static_cast<int64_t>(bytes.size());
                               progress.add(static_cast<int64_t>(bytes.size()));
                               return true;
                             });
      writer->close();
      check(!too_long, Code::io, "download '{}': {}: more than the {} bytes of its list were sent", shown(n), f.path,
            f.size);
      if (have > most) attempt = 1;  // progress resets the attempts
      most = std::max(most, have);
    }
    if (have == f.size && (a.status == 200 || a.status == 206)) {
      const std::string digest = digest_of(part, f);
      if (digest == name_of_blob(f)) return rename_durable(part, blob);
      fs::remove(part);
      progress.add(-f.size);
      check(!damaged, Code::io, "download '{}': {}: the digest of what was sent is {}, expected {}; it was removed",
            shown(n), f.path, digest, name_of_blob(f));
      damaged = true;
      log_warning("download '{}': {} is corrupt; it is downloaded again", shown(n), f.path);
      continue;
    }
    if (a.status == 416) {
      fs::remove(part);
    } else if (a.status == 200 || a.status == 206) {
      a = {.status = 0, .failure = fmt::format("{} of {} bytes were sent", have, f.size)};
    }
    if ((!may_pass(a) && a.status != 416) || attempt >= kAttempts) throw refusal(n, f.path, a);
    const int64_t pause = pause_of(a, attempt);
    if (pause > 1)
      log_info("{}: {}; retrying in {} s", f.path, a.status ? fmt::format("status {}", a.status) : a.failure, pause);
    wait_seconds(pause);
  }
}

bool ends_with_any(const std::string& s, std::initializer_list<const char*> ends) {
  return std::ranges::any_of(ends, [&](const char* e) { return s.ends_with(e); });
}

/// Parts of a weights file's name: "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors" has folder "unet",
/// stem "diffusion_pytorch_model", variant "fp16". None for other files than weights and their indices.
struct WeightsName {
  std::string folder, variant;
};
std::optional<WeightsName> weights_name(const std::string& path) {
  const size_t slash = path.rfind('/');
  std::string name = slash == path.npos ? path : path.substr(slash + 1);
  for (const char* stem : {"diffusion_pytorch_model", "model"}) {
    const std::string s = stem;
    const size_t end = name.find(".safetensors");
    if (!name.starts_with(s) || end == name.npos || !ends_with_any(name, {".safetensors", ".json"})) continue;
    std::string rest = name.substr(s.size(), end - s.size());  // "", ".fp16", ".fp16-00001-of-00002"
    constexpr std::string_view kIndex = ".safetensors.index";  // ".json", ".fp16.json"
    if (name.ends_with(".json") && name.substr(end).starts_with(kIndex)) {
      const std::string of = name.substr(end + kIndex.size());
      rest = of.substr(0, of.size() - std::string_view(".json").size());
    }
    if (const size_t shard = rest.rfind("-of-"); shard != rest.npos && shard >= 6) rest = rest.substr(0, shard - 6);
    if (!rest.empty() && rest[0] != '.') continue;
    return WeightsName{slash == path.npos ? "" : path.substr(0, slash), rest.empty() ? "" : rest.substr(1)};
  }
  return std::nullopt;
}

}  // namespace

bool is_hub_name(const std::string& name) {
  const size_t slash = name.find('/');
  return slash != std::string::npos && slash > 0 && slash + 1 < name.size() &&
         name.find('/', slash + 1) == std::string::npos && name[0] != '.' && name.find("..") == std::string::npos &&
         name.find_first_of(":?#% \\") == std::string::npos;
}

HubName hub_name(const std::string& name, const std::string& revision, const std::string& kind) {
  HubName out{.repository = name, .revision = revision, .kind = kind};
  if (name.starts_with("hf://")) {
    out.checks = true;
    out.repository = name.substr(5);
    for (const char* other : {"models", "datasets"})
      if (out.repository.starts_with(std::string(other) + "/")) {
        out.kind = other;
        out.repository = out.repository.substr(std::string(other).size() + 1);
      }
  }
  if (const size_t at = out.repository.find('@'); at != std::string::npos) {
    out.revision = out.repository.substr(at + 1);
    out.repository = out.repository.substr(0, at);
  }
  return out;
}

std::string cache_entry(const HubName& n) {
  std::string root = variable("HF_HUB_CACHE");
  if (root.empty()) root = hub_home() + "/hub";
  std::string entry = n.kind + "--" + n.repository;
  entry.replace(entry.rfind('/'), 1, "--");
  return root + "/" + entry;
}

std::string cached_snapshot(const HubName& n) {
  const std::string entry = cache_entry(n), revision = n.revision.empty() ? "main" : n.revision;
  if (revision.find("..") != std::string::npos) return "";
  std::string commit = revision;
  if (const std::string ref = entry + "/refs/" + revision; fs::is_regular_file(ref))
    commit = without_space(read_file(ref));
  if (commit.empty() || commit.find('/') != std::string::npos) return "";
  const std::string folder = entry + "/snapshots/" + commit;
  return fs::is_directory(folder) ? folder : "";
}

std::string hub_token() {
  {
    const std::lock_guard lock(token_mutex());
    if (!token_override().empty()) return token_override();
  }
  if (std::string token = without_space(variable("HF_TOKEN")); !token.empty()) return token;
  std::string file = variable("HF_TOKEN_PATH");
  if (file.empty()) file = hub_home() + "/token";
  return fs::is_regular_file(file) ? without_space(read_text_file(file)) : "";
}

void set_hub_token(const std::string& token) {
  const std::lock_guard lock(token_mutex());
  token_override() = token;
}

bool hub_is_offline() {
  for (const char* name : {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}) {
    std::string value = variable(name);
    std::ranges::transform(value, value.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    if (value == "1" || value == "ON" || value == "YES" || value == "TRUE") return true;
  }
  return false;
}

std::vector<HubFile> needed_files(const std::vector<HubFile>& files, const std::string& model_index,
                                  const std::string& variant) {
  // Folders of components; safety checkers are not used.
  std::set<std::string> folders;
  const json index = model_index.empty() ? json() : parse_json_or_discard(model_index);
  if (index.is_object())
    for (const auto& [name, value] : index.items())
      if (value.is_array() && value.size() == 2 && value[1].is_string() && name != "safety_checker")
        folders.insert(name);
  std::map<std::string, std::set<std::string>> variants;  // of the weights in each folder
  for (const HubFile& f : files)
    if (const auto w = weights_name(f.path)) variants[w->folder].insert(w->variant);
  std::vector<HubFile> out;
  for (const HubFile& f : files) {
    const size_t slash = f.path.find('/');
    const std::string top = slash == f.path.npos ? "" : f.path.substr(0, slash);
    if (index.is_object() && !folders.contains(top) && f.path != "model_index.json") continue;
    if (const auto w = weights_name(f.path)) {
      const std::set<std::string>& all = variants[w->folder];
      const std::string& chosen = all.contains(variant) ? variant : all.contains("") ? "" : *all.begin();
      if (w->variant == chosen) out.push_back(f);
    } else if (f.path.ends_with(".safetensors") ? !index.is_object()
                                                : ends_with_any(f.path, {".json", ".txt", ".model", ".jinja"})) {
      out.push_back(f);
    }
  }
  return out;
}

std::string download_snapshot(const HubName& n, const std::string& variant, const std::string& only) {
  check(is_hub_name(n.repository), Code::invalid_config, "'{}' is not the name of a repository; expected owner/name",
        n.repository);
  const std::string entry = cache_entry(n);
  const Listing all = list_repository(n);
  const auto find = [&](const std::string& path) { return std::ranges::find(all.files, path, &HubFile::path); };
  std::vector<HubFile> selected;
  if (!only.empty()) {
    if (find(only) == all.files.end())
      throw Error(Code::io, fmt::format("download '{}': there is no file '{}'", shown(n), only))
          .note(fmt::format("try: look at {}", page_of(n)));
    selected = {*find(only)};
  } else if (n.kind == "datasets") {
    std::ranges::copy_if(all.files, std::back_inserter(selected), [](const HubFile& f) {
      return !ends_with_any(f.path, {".md", ".py", ".gitattributes", ".gitignore"});
    });
  } else {
    std::string index;
    if (const auto it = find("model_index.json"); it != all.files.end()) {
      make_folders(entry + "/blobs");
      Progress progress("downloading " + n.repository, 0, it->size);
      download_blob(n, all.commit, *it, progress);
      index = read_file(entry + "/blobs/" + name_of_blob(*it));
    }
    selected = needed_files(all.files, index, variant);
  }
  check(!selected.empty(), Code::io, "download '{}': it holds no file that is needed; the first of {} is {}", shown(n),
        all.files.size(), all.files.empty() ? "none" : all.files[0].path);

  std::string snapshot = entry + "/snapshots/" + all.commit;
  std::vector<HubFile> missing;
  int64_t total = 0, left = 0;
  for (const HubFile& f : selected) {
    if (exists(snapshot + "/" + f.path)) continue;
    missing.push_back(f);
    total += f.size;
    left += f.size - (exists(entry + "/blobs/" + name_of_blob(f))
                          ? f.size
                          : std::min(f.size, size_of_file(entry + "/blobs/" + name_of_blob(f) + ".incomplete")));
  }
  make_folders(entry + "/blobs");
  if (!missing.empty()) {
    struct statvfs disk {};
    if (::statvfs(entry.c_str(), &disk) == 0) {
      const auto free = static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
      if (free < left)
        throw Error(Code::io, fmt::format("download '{}': {} are needed in '{}', {} are free", shown(n),
                                          bytes_text(left), entry, bytes_text(free)))
            .note("try: free space there, or set HF_HUB_CACHE to a folder of another disk");
    }
    log_info("downloading '{}': {} file{}, {} into '{}'", shown(n), missing.size(), missing.size() == 1 ? "" : "s",
             bytes_text(total), entry);
    Progress progress("downloading " + n.repository, total - left, total);
    for (const HubFile& f : missing) download_blob(n, all.commit, f, progress);
  }
  // A new snapshot is renamed when it is complete.
  const bool fresh = !fs::is_directory(snapshot);
  const std::string folder = fresh ? fmt::format("{}/snapshots/.new-{}-{}", entry, all.commit, ::getpid()) : snapshot;
  for (const HubFile& f : missing) {
    const fs::path link = fs::path(folder) / f.path;
    make_folders(link.parent_path());
    std::string up;
    for (size_t i = 0; i < static_cast<size_t>(std::ranges::count(f.path, '/')) + 2; ++i) up += "../";
    std::error_code ec;
    fs::create_symlink(up + "blobs/" + name_of_blob(f), link, ec);
    check(!ec || exists(link), Code::io, "link '{}': {}", link.string(), ec.message());
  }
  if (fresh) {
    std::error_code ec;
    fs::rename(folder, snapshot, ec);
    if (ec) fs::remove_all(folder);  // another process was faster
    check(fs::is_directory(snapshot), Code::io, "rename '{}': {}", folder, ec.message());
  }
  if (const std::string revision = n.revision.empty() ? "main" : n.revision; revision != all.commit) {
    make_folders(fs::path(entry + "/refs/" + revision).parent_path());
    write_file_atomic(entry + "/refs/" + revision, all.commit);
  }
  return snapshot;
}

std::string download_image(const std::string& url, int64_t limit, bool local_addresses) {
  check(url.starts_with("https://") || url.starts_with("http://"), Code::invalid_config,
        "image '{}': expected a file, or an address that starts with https:// or http://", url);
  std::string bytes;
  bool too_long = false;
  const HttpAnswer a =
      http_library().get({.url = url, .local_addresses = local_addresses}, [&](int64_t, std::string_view part) {
        check_interrupt("downloading");
        too_long = static_cast<int64_t>(bytes.size() + part.size()) > limit;
        if (!too_long) bytes += part;
        return !too_long;
      });
  check(!too_long, Code::io, "image '{}': more than {} bytes", url, limit);
  check(a.status != 0, Code::io, "image '{}': {}", url, a.failure);
  check(a.status == 200, Code::io, "image '{}': status {}", url, a.status);
  const auto type = a.headers.find("content-type");
  check(type != a.headers.end() && type->second.starts_with("image/"), Code::io,
        "image '{}': its content type is {}, expected image/…", url,
        type == a.headers.end() ? "not given" : type->second);
  return bytes;
}

}  // namespace md
