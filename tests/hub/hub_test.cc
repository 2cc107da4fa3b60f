// Downloads from a test server that speaks the Hub's HTTP interface: file lists, redirects of large files to another
// host, ranges, refusals, busy answers, dropped connections, wrong bytes.
#include "maxdiffusion/storage/hub.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/storage/http_library.h"
#include "maxdiffusion/storage/hub_cache.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// An HTTP server on a port of 127.0.0.1; one response per connection.
class Server {
 public:
  struct Request {
    std::string path;                            // with its query
    std::map<std::string, std::string> headers;  // as they were sent
  };
  struct Answer {
    int status = 200;
    std::string body;
    std::vector<std::string> headers;
    int64_t cut_after = -1;  // bytes of the body, then the connection closes
  };
  using Handler = std::function<Answer(const Request&)>;

  explicit Server(Handler handler) : handler_(std::move(handler)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof a;
    auto* address = reinterpret_cast<sockaddr*>(&a);
    if (::bind(listener_, address, size) != 0 || ::listen(listener_, 16) != 0 ||
        ::getsockname(listener_, address, &size))
      ADD_FAILURE() << "the server cannot listen";
    url_ = fmt::format("http://127.0.0.1:{}", ntohs(a.sin_port));
    thread_ = std::thread([this] {
      for (int c; (c = ::accept(listener_, nullptr, nullptr)) >= 0; ::close(c)) serve(c);
    });
  }
  ~Server() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }
  const std::string& url() const { return url_; }
  std::vector<Request> requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  void serve(int connection) {
    std::string head;
    char c;
    while (head.find("\r\n\r\n") == head.npos && ::recv(connection, &c, 1, 0) == 1) head += c;
    Request r;
    r.path = head.substr(4, head.find(' ', 4) - 4);
    for (size_t at = head.find("\r\n") + 2, end; (end = head.find("\r\n", at)) != head.npos && end > at; at = end + 2) {
      const size_t colon = head.find(": ", at);
      r.headers[head.substr(at, colon - at)] = head.substr(colon + 2, end - colon - 2);
    }
    const Answer a = handler_(r);
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(r);
    }
    std::string out =
        fmt::format("HTTP/1.1 {} x\r\nContent-Length: {}\r\nConnection: close\r\n", a.status, a.body.size());
    for (const std::string& h : a.headers) out += h + "\r\n";
    out += "\r\n" + (a.cut_after < 0 ? a.body : a.body.substr(0, static_cast<size_t>(a.cut_after)));
    for (size_t sent = 0; sent < out.size();) {
      const ssize_t n = ::send(connection, out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) break;
      sent += static_cast<size_t>(n);
    }
  }
  Handler handler_;
  int listener_ = -1;
  std::string url_;
  std::thread thread_;
  std::mutex mutex_;
  std::vector<Request> requests_;
};

std::string digest(const char* name, const std::string& bytes) {
  const auto d = http_library().digest(name);
  d->add(bytes);
  return d->hex();
}
std::string git_sha1(const std::string& bytes) {
  return digest("sha1", fmt::format("blob {}", bytes.size()) + '\0' + bytes);
}

constexpr const char* kCommit = "0123456789abcdef0123456789abcdef01234567";
const std::string kWeights = std::string(3'000'000, 'w') + "end";

class HubTest : public testing::Test {
 protected:
  using Answer = Server::Answer;
  HubTest() {
    for (const auto& [name, value] : {std::pair<const char*, std::string>{"HF_HUB_CACHE", cache.path()},
                                      {"HF_ENDPOINT", hub.url()},
                                      {"HF_TOKEN", "hf_secret"},
                                      {"HF_HUB_OFFLINE", "0"}})
      ::setenv(name, value.c_str(), 1);
  }
  ~HubTest() override {
    for (const char* name : {"HF_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE"}) ::unsetenv(name);
  }

  Answer list() const {
    json j = {{"sha", kCommit}, {"siblings", json::array()}};
    for (const auto& [path, bytes] : files) {
      json s = {{"rfilename", path}, {"size", bytes.size()}, {"blobId", git_sha1(bytes)}};
      if (path.ends_with(".safetensors")) s["lfs"] = {{"sha256", digest("sha256", bytes)}, {"size", bytes.size()}};
      j["siblings"].push_back(s);
    }
    return {200, j.dump(), {"Content-Type: application/json"}};
  }
  static Answer part_of(const std::string& bytes, const Server::Request& r) {
    const auto range = r.headers.find("Range");
    if (range == r.headers.end()) return {200, bytes, {}};
    const size_t from = std::stoul(range->second.substr(6));
    return {
        206, bytes.substr(from), {fmt::format("Content-Range: bytes {}-{}/{}", from, bytes.size() - 1, bytes.size())}};
  }
  /// The Hub: lists, small files, redirects of large ones.
  Answer response(const Server::Request& r) {
    if (on_hub)
      if (const auto a = on_hub(r)) return *a;
    if (r.path.starts_with("/api/models/owner/name/revision/main")) return list();
    const std::string resolve = std::string("/owner/name/resolve/") + kCommit + "/";
    if (!r.path.starts_with(resolve)) return {404, "Repository Not Found", {"X-Error-Code: RepoNotFound"}};
    const std::string path = r.path.substr(resolve.size());
    if (!files.contains(path)) return {404, "Entry not found", {"X-Error-Code: EntryNotFound"}};
    if (path.ends_with(".safetensors"))
      return {302, "", {fmt::format("Location: {}/{}", cdn.url(), path), "X-Linked-Size: 1"}};
    return part_of(files.at(path), r);
  }
  std::string refusal(const std::string& name = "owner/name") const {
    try {
      return "found " + local_folder(name);
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find("hf_secret"), std::string::npos);
      return e.what();
    }
  }
  static bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

  std::map<std::string, std::string> files = {
      {"model_index.json", R"({"_class_name": "X", "unet": ["diffusers", "U"], "safety_checker": ["a", "B"]})"},
      {"unet/config.json", "{}"},
      {"unet/diffusion_pytorch_model.safetensors", kWeights},
      {"unet/diffusion_pytorch_model.fp16.safetensors", "half"},
      {"unet/diffusion_pytorch_model.bin", "pickle"},
      {"safety_checker/model.safetensors", "unwanted"},
      {"single.safetensors", "unwanted"},
      {"README.md", "unwanted"}};
  std::function<std::optional<Answer>(const Server::Request&)> on_hub, on_cdn;
  TemporaryFolder cache;
  Server cdn{[this](const Server::Request& r) {
    if (on_cdn)
      if (const auto a = on_cdn(r)) return *a;
    return part_of(files.at(r.path.substr(1)), r);
  }};
  Server hub{[this](const Server::Request& r) { return response(r); }};
  const std::string entry = cache / "models--owner--name";
  const std::string snapshot = entry + "/snapshots/" + kCommit;
};

// S4-9, S4-48
TEST_F(HubTest, DownloadsIntoTheCacheOfTheHubsTools) {
  EXPECT_EQ(local_folder("owner/name"), snapshot);
  EXPECT_EQ(read_file(snapshot + "/unet/diffusion_pytorch_model.safetensors"), kWeights);
  EXPECT_EQ(read_file(entry + "/refs/main"), kCommit);
  EXPECT_EQ(fs::read_symlink(snapshot + "/unet/diffusion_pytorch_model.safetensors"),
            "../../../blobs/" + digest("sha256", kWeights));
  EXPECT_EQ(fs::read_symlink(snapshot + "/model_index.json"), "../../blobs/" + git_sha1(files["model_index.json"]));
  std::set<std::string> names;
  for (const auto& f : fs::recursive_directory_iterator(snapshot))
    if (!f.is_directory()) names.insert(f.path().lexically_relative(snapshot));
  EXPECT_EQ(names, (std::set<std::string>{"model_index.json", "unet/config.json",
                                          "unet/diffusion_pytorch_model.safetensors"}));
  const auto index_requests = [&] {
    return std::ranges::count_if(hub.requests(), [](const auto& r) { return r.path.ends_with("/model_index.json"); });
  };
  EXPECT_EQ(index_requests(), 1);
  // The second time no request is sent; with hf:// one for the list, and one for each newer file.
  const size_t requests_before = hub.requests().size();
  EXPECT_EQ(local_folder("owner/name"), snapshot);
  EXPECT_EQ(hub.requests().size(), requests_before);
  EXPECT_EQ(local_folder("hf://owner/name"), snapshot);
  EXPECT_EQ(hub.requests().size(), requests_before + 1);
}

// S4-60
TEST_F(HubTest, TheTokenGoesToTheHubOnly) {
  local_folder("owner/name");
  ASSERT_EQ(cdn.requests().size(), 1u);
  EXPECT_FALSE(cdn.requests()[0].headers.contains("Authorization"));
  for (const Server::Request& r : hub.requests()) EXPECT_EQ(r.headers.at("Authorization"), "Bearer hf_secret");
  set_hub_token("hf_other");
  EXPECT_EQ(hub_token(), "hf_other");
  set_hub_token("");
  EXPECT_EQ(hub_token(), "hf_secret");
}

TEST_F(HubTest, OneFileAndAVariantAreDownloadedAlone) {
  EXPECT_EQ(read_file(local_file("owner/name", "single.safetensors")), "unwanted");
  EXPECT_FALSE(exists(snapshot + "/unet"));
  local_folder("hf://owner/name", "", "models", "fp16");
  EXPECT_EQ(read_file(snapshot + "/unet/diffusion_pytorch_model.fp16.safetensors"), "half");
  EXPECT_FALSE(exists(snapshot + "/unet/diffusion_pytorch_model.safetensors"));
  EXPECT_TRUE(has(refusal("owner/none"), "status 404: it does not exist"));
}

TEST_F(HubTest, ACutConnectionIsResumedWhereItStopped) {
  int cuts = 2;
  on_cdn = [&](const Server::Request& r) -> std::optional<Answer> {
    if (cuts-- <= 0) return {};
    Answer a = part_of(kWeights, r);
    a.cut_after = 1'000'000;
    return a;
  };
  EXPECT_EQ(read_file(local_folder("owner/name") + "/unet/diffusion_pytorch_model.safetensors"), kWeights);
  const auto requests = cdn.requests();
  ASSERT_EQ(requests.size(), 3u);
  EXPECT_EQ(requests[1].headers.at("Range"), "bytes=1000000-");
  EXPECT_EQ(requests[2].headers.at("Range"), "bytes=2000000-");
}

TEST_F(HubTest, ResumesPartialDownloadsAndRestartsWithoutRanges) {
  make_folders(entry + "/blobs");
  const std::string part = entry + "/blobs/" + digest("sha256", kWeights) + ".incomplete";
  write_file_atomic(part, kWeights.substr(0, 2'999'000));
  EXPECT_EQ(read_file(local_folder("owner/name") + "/unet/diffusion_pytorch_model.safetensors"), kWeights);
  EXPECT_EQ(cdn.requests()[0].headers.at("Range"), "bytes=2999000-");
  EXPECT_FALSE(exists(part));
  fs::remove_all(entry);
  make_folders(entry + "/blobs");
  write_file_atomic(part, "www");
  on_cdn = [&](const Server::Request&) { return Answer{200, kWeights, {}}; };
  EXPECT_EQ(read_file(local_folder("owner/name") + "/unet/diffusion_pytorch_model.safetensors"), kWeights);
}

TEST_F(HubTest, WrongBytesAreNeverTakenForTheFile) {
  int wrong = 1;
  on_cdn = [&](const Server::Request&) -> std::optional<Answer> {
    if (wrong-- <= 0) return {};
    return Answer{200, std::string(kWeights.size(), 'x'), {}};
  };
  EXPECT_EQ(read_file(local_folder("owner/name") + "/unet/diffusion_pytorch_model.safetensors"), kWeights);
  fs::remove_all(entry);
  wrong = 9;
  EXPECT_TRUE(has(refusal(), "unet/diffusion_pytorch_model.safetensors: the digest of what was sent is "));
  EXPECT_TRUE(cached_snapshot(hub_name("owner/name")).empty());
  EXPECT_FALSE(exists(entry + "/refs/main"));
  for (const auto& f : fs::directory_iterator(entry + "/blobs"))
    EXPECT_EQ(f.path().string().find(digest("sha256", kWeights)), std::string::npos);
  wrong = 9;
  on_cdn = [&](const Server::Request&) { return Answer{200, kWeights + "more", {}}; };
  EXPECT_TRUE(has(refusal(), "more than the 3000003 bytes of its list were sent"));
}

TEST_F(HubTest, ABusyServerIsWaitedFor) {
  int busy = 2;
  on_hub = [&](const Server::Request& r) -> std::optional<Answer> {
    if (!r.path.starts_with("/api") || busy-- <= 0) return {};
    return busy == 1 ? Answer{429, "slow down", {"Retry-After: 1"}} : Answer{503, "", {"Retry-After: 0"}};
  };
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(local_folder("owner/name"), snapshot);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
}

TEST_F(HubTest, RefusalsSayWhatToDo) {
  const auto refused = [&](int status, const std::vector<std::string>& headers) {
    on_hub = [=](const Server::Request&) { return Answer{status, "no", headers}; };
    return refusal();
  };
  EXPECT_TRUE(
      has(refused(403, {"X-Error-Code: GatedRepo"}), "visit " + hub.url() + "/owner/name and accept its terms"));
  EXPECT_TRUE(has(refused(401, {}), "status 401: the token is not accepted"));
  EXPECT_TRUE(has(refused(404, {"X-Error-Code: RevisionNotFound"}), "there is no revision"));
  EXPECT_TRUE(has(refused(404, {"X-Error-Code: RepoNotFound"}), "status 404"));
  ::setenv("HF_TOKEN", " ", 1);
  ::setenv("HF_TOKEN_PATH", "/nowhere/token", 1);
  EXPECT_TRUE(has(refused(401, {}), "it needs a token"));
  const TemporaryFolder home;  // a token's file is text as an editor saves it
  ::setenv("HF_TOKEN_PATH", (home / "token").c_str(), 1);
  write_file_atomic(home / "token", "\xef\xbb\xbfhf_file\n");
  EXPECT_EQ(hub_token(), "hf_file");
  write_file_atomic(home / "token", std::string("\xff\xfeh\0f\0_\0w\0", 10));
  EXPECT_EQ(hub_token(), "hf_w");
  ::unsetenv("HF_TOKEN_PATH");
  on_hub = [](const Server::Request&) { return Answer{200, "<html>", {}}; };
  EXPECT_TRUE(has(refusal(), "is not a list of files"));
  ::setenv("HF_HUB_OFFLINE", "1", 1);
  EXPECT_TRUE(has(refusal(), "HF_HUB_OFFLINE=0"));
}

TEST_F(HubTest, NamesThatLeadOutAreRefused) {
  files["../../evil"] = "x";
  EXPECT_TRUE(has(refusal(), "names the file '../../evil'"));
  for (const char* name : {"../owner", "hf://owner", "a/b/c", "hf://../x", "owner/na?me", "owner/.."})
    EXPECT_TRUE(has(refusal(name), "there is no file or folder")) << name;
}

TEST_F(HubTest, AServerThatIsGoneLeavesTheCachedSnapshotInUse) {
  local_folder("owner/name");
  on_hub = [](const Server::Request&) { return Answer{404, "", {}}; };
  EXPECT_EQ(local_folder("hf://owner/name"), snapshot);
}

TEST_F(HubTest, ADiskThatIsFullLeavesNothingThatIsTakenForAFile) {
  static int64_t room;
  room = 1'000'000;
  set_write_hook([](const std::string& path, size_t bytes) {
    room -= path.ends_with(".incomplete") ? static_cast<int64_t>(bytes) : 0;
    if (room < 0) throw Error(Code::io, fmt::format("write '{}': No space left on device", path));
  });
  EXPECT_TRUE(has(refusal(), "No space left on device"));
  set_write_hook(nullptr);
  EXPECT_TRUE(cached_snapshot(hub_name("owner/name")).empty());
  EXPECT_FALSE(exists(entry + "/blobs/" + digest("sha256", kWeights)));
  // With free space again, the download resumes.
  EXPECT_EQ(read_file(local_folder("owner/name") + "/unet/diffusion_pytorch_model.safetensors"), kWeights);
  EXPECT_TRUE(cdn.requests().back().headers.contains("Range"));
}

TEST_F(HubTest, DatasetsAreDownloadedWithAllTheirData) {
  files = {{"data/train-00000-of-00001.parquet", "PAR1 rows PAR1"}, {"README.md", "unwanted"}, {"load.py", "unwanted"}};
  on_hub = [&](const Server::Request& r) -> std::optional<Answer> {
    if (r.path.starts_with("/api/datasets/owner/name/revision/main")) return list();
    const std::string resolve = std::string("/datasets/owner/name/resolve/") + kCommit + "/";
    if (!r.path.starts_with(resolve)) return Answer{404, "", {"X-Error-Code: RepoNotFound"}};
    return part_of(files.at(r.path.substr(resolve.size())), r);
  };
  for (const char* name : {"hf://datasets/owner/name", "hf://owner/name", "owner/name"}) {
    const std::string folder = local_folder(name, "", "datasets");
    EXPECT_EQ(folder, cache / "datasets--owner--name/snapshots/" + kCommit) << name;
    EXPECT_EQ(read_file(folder + "/data/train-00000-of-00001.parquet"), "PAR1 rows PAR1");
    EXPECT_FALSE(exists(folder + "/load.py"));
  }
}

// S4-93, S4-94
TEST_F(HubTest, ImagesComeFromPublicAddressesOnly) {
  Answer answer{200, "png bytes", {"Content-Type: image/png"}};
  Server images([&](const Server::Request& r) {
    if (r.path == "/away") return Answer{302, "", {"Location: file:///etc/passwd"}};
    if (r.path == "/round") return Answer{302, "", {"Location: /round"}};
    return answer;
  });
  const auto refused = [](const std::string& url, int64_t limit, bool local) {
    try {
      return "got " + download_image(url, limit, local);
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  const std::string url = images.url() + "/a.png";
  EXPECT_EQ(download_image(url, 9, true), "png bytes");
  EXPECT_TRUE(has(refused(url, 8, true), "more than 8 bytes"));
  EXPECT_TRUE(has(refused(url, 99, false), "an address of this machine or of a private network"));
  EXPECT_TRUE(has(refused(images.url() + "/away", 99, true), "image '"));
  EXPECT_TRUE(has(refused(images.url() + "/round", 99, true), "image '"));
  EXPECT_TRUE(has(refused("http://[::1]:9/a.png", 99, false), "an address of this machine"));
  EXPECT_TRUE(has(refused("http://10.1.2.3/a.png", 99, false), "an address of this machine or of a private network"));
  EXPECT_TRUE(has(refused("http://169.254.169.254/latest", 99, false), "a private network"));
  EXPECT_TRUE(has(refused("file:///etc/passwd", 99, true), "expected a file, or an address"));
  answer.headers = {"Content-Type: text/html"};
  EXPECT_TRUE(has(refused(url, 99, true), "its content type is text/html"));
  answer.status = 404;
  EXPECT_TRUE(has(refused(url, 99, true), "status 404"));
}

TEST(HubFiles, OfVariantsAndShardsOneSetIsNeeded) {
  const auto names = [](const std::vector<std::string>& paths, const std::string& index, const std::string& variant) {
    std::vector<HubFile> files;
    for (const std::string& p : paths) files.push_back({.path = p});
    std::vector<std::string> out;
    for (const HubFile& f : needed_files(files, index, variant)) out.push_back(f.path);
    return out;
  };
  using Names = std::vector<std::string>;
  const Names all = {"t/model-00001-of-00002.safetensors",
                     "t/model-00002-of-00002.safetensors",
                     "t/model.safetensors.index.json",
                     "t/model.fp16-00001-of-00001.safetensors",
                     "t/model.safetensors.index.fp16.json",
                     "t/config.json",
                     "t/tokenizer.json",
                     "t/spiece.model",
                     "u/config.json"};
  EXPECT_EQ(names(all, R"({"t": ["x", "Y"], "u": [null, null]})", ""),
            (Names{all[0], all[1], all[2], all[5], all[6], all[7]}));
  EXPECT_EQ(names({"lora.safetensors", "other.safetensors", "a.bin"}, "", ""),
            (Names{"lora.safetensors", "other.safetensors"}));
  EXPECT_EQ(names({"model.fp16.safetensors"}, "", ""), Names{"model.fp16.safetensors"});
}

}  // namespace
}  // namespace md
