#include "tests/remote/bucket_server.h"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"

namespace md {
namespace {

constexpr int64_t kPage = 3;  // objects of a listing, so that every test of more goes on to the next

std::string decoded(const std::string& s) {
  std::string out;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '%' && i + 2 < s.size()) {
      out += static_cast<char>(std::stoi(s.substr(i + 1, 2), nullptr, 16));
      i += 2;
    } else {
      out += s[i] == '+' ? ' ' : s[i];
    }
  }
  return out;
}

std::string formatted(int64_t seconds, const char* form) {
  const time_t t = seconds;
  std::tm tm{};
  ::gmtime_r(&t, &tm);
  char text[64];
  return {text, std::strftime(text, sizeof text, form, &tm)};
}

std::string escaped(const std::string& s) {
  std::string out;
  for (char c : s) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else {
      out += c;
    }
  }
  return out;
}

bool send_all(int connection, const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = ::send(connection, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return false;
    sent += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

BucketServer::BucketServer() {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof a;
  check(listener_ >= 0 && ::bind(listener_, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0 &&
            ::listen(listener_, 128) == 0 && ::getsockname(listener_, reinterpret_cast<sockaddr*>(&a), &size) == 0,
        Code::io, "the test's server cannot listen on 127.0.0.1");
  address_ = fmt::format("127.0.0.1:{}", ntohs(a.sin_port));
  accepting_ = std::thread([this] { accept_loop(); });
}

BucketServer::~BucketServer() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    ::shutdown(listener_, SHUT_RDWR);
    for (int c : connections_) ::shutdown(c, SHUT_RDWR);
  }
  accepting_.join();
  for (std::thread& t : threads_) t.join();
  ::close(listener_);
}

void BucketServer::put(const std::string& bucket, const std::string& key, const std::string& bytes, int64_t modified) {
  const std::lock_guard lock(mutex_);
  auto& objects = buckets_[bucket];
  if (!key.empty()) objects[key] = {bytes, modified, content_hash(bytes)};
}

void BucketServer::put_files(const std::string& bucket, const std::string& prefix, const std::string& path) {
  namespace fs = std::filesystem;
  if (!fs::is_directory(path)) return put(bucket, prefix, read_file(path));
  for (const auto& e : fs::recursive_directory_iterator(path)) {
    if (e.is_regular_file())
      put(bucket, prefix + "/" + fs::relative(e.path(), path).string(), read_file(e.path().string()));
  }
}

void BucketServer::lock(const std::string& bucket, const std::string& access_key) {
  const std::lock_guard lock(mutex_);
  locks_[bucket] = access_key;
}

void BucketServer::fail(Fault fault, int64_t times) {
  const std::lock_guard lock(mutex_);
  fault_ = fault, faults_left_ = times;
}

std::vector<std::string> BucketServer::requests() {
  const std::lock_guard lock(mutex_);
  return std::exchange(requests_, {});
}

std::set<std::string> BucketServer::signers() {
  const std::lock_guard lock(mutex_);
  return signers_;
}

void BucketServer::accept_loop() {
  for (;;) {
    const int c = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    const std::lock_guard lock(mutex_);
    if (stopping_) {
      if (c >= 0) ::close(c);
      return;
    }
    if (c < 0) continue;
    const int on = 1;
    ::setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connections_.insert(c);
    threads_.emplace_back([this, c] {
      serve(c);
      const std::lock_guard lock(mutex_);
      connections_.erase(c);
      ::close(c);
    });
  }
}

bool BucketServer::receive(int connection, std::string& held, Request& r) {
  size_t end;
  while ((end = held.find("\r\n\r\n")) == std::string::npos) {
    char bytes[8192];
    const ssize_t n = ::recv(connection, bytes, sizeof bytes, 0);
    if (n <= 0) return false;
    held.append(bytes, static_cast<size_t>(n));
  }
  std::string head = held.substr(0, end + 2);
  held.erase(0, end + 4);
  const size_t line = head.find("\r\n"), first = head.find(' '), second = head.find(' ', first + 1);
  r.method = head.substr(0, first);
  std::string target = head.substr(first + 1, second - first - 1);
  const size_t q = std::min(target.find('?'), target.size());
  r.path = decoded(target.substr(0, q));
  for (size_t at = q + 1; at < target.size();) {
    const size_t stop = std::min(target.find('&', at), target.size()), equals = std::min(target.find('=', at), stop);
    r.query[decoded(target.substr(at, equals - at))] =
        decoded(target.substr(std::min(equals + 1, stop), stop - std::min(equals + 1, stop)));
    at = stop + 1;
  }
  for (size_t at = line + 2; at < head.size();) {
    const size_t stop = head.find("\r\n", at), colon = head.find(':', at);
    std::string name = head.substr(at, colon - at);
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    const size_t value = std::min(head.find_first_not_of(' ', colon + 1), stop);
    r.headers[name] = head.substr(value, stop - value);
    at = stop + 2;
  }
  return true;
}

void BucketServer::serve(int connection) {
  std::string held;
  for (Request r; receive(connection, held, r); r = {}) {
    Answer a = answer(r);
    Fault fault = Fault::none;
    if (a.data) {
      const std::lock_guard lock(mutex_);
      if (faults_left_ > 0) --faults_left_, fault = fault_;
    }
    if (fault == Fault::drop) return;
    const char* reason = a.status < 300 ? "OK" : "Error";
    std::string head = fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n", a.status, reason,
                                   a.type, a.body.size());
    for (const std::string& h : a.headers) head += h + "\r\n";
    if (r.method == "HEAD") a.body.clear();
    if (fault == Fault::truncate) a.body.resize(a.body.size() / 2);
    if (!send_all(connection, head + "\r\n" + a.body) || fault == Fault::truncate) return;
  }
}

BucketServer::Answer BucketServer::answer(const Request& r) {
  const std::lock_guard lock(mutex_);
  requests_.push_back(r.method + " " + r.path);
  if (r.headers.contains("authorization")) {
    const std::string& who = r.headers.at("authorization");
    const size_t key = who.find("Credential=");
    signers_.insert(key == std::string::npos ? who : who.substr(key + 11, who.find('/', key) - key - 11));
  }
  return r.path.starts_with("/storage/v1/") ? google(r) : s3(r);
}

bool BucketServer::may_read(const Request& r, const std::string& bucket) const {
  const auto lock = locks_.find(bucket);
  if (lock == locks_.end()) return true;
  const auto who = r.headers.find("authorization");
  return !lock->second.empty() && who != r.headers.end() &&
         who->second.find("Credential=" + lock->second + "/") != std::string::npos;
}

BucketServer::Answer BucketServer::media(const Request& r, const Object& o) const {
  Answer a{.type = "application/octet-stream", .data = true};
  a.headers = {"Last-Modified: " + formatted(o.modified, "%a, %d %b %Y %H:%M:%S GMT"),
               fmt::format("ETag: \"{}\"", o.hash), "Accept-Ranges: bytes"};
  const auto range = r.headers.find("range");
  if (range == r.headers.end()) {
    a.body = o.bytes;
    return a;
  }
  size_t begin = 0, end = o.bytes.size();
  const size_t dash = range->second.find('-');
  begin = std::stoull(range->second.substr(6, dash - 6));
  if (dash + 1 < range->second.size())
    end = std::min(end, static_cast<size_t>(std::stoull(range->second.substr(dash + 1))) + 1);
  if (begin >= o.bytes.size()) return {.status = 416};
  a.status = 206;
  a.headers.push_back(fmt::format("Content-Range: bytes {}-{}/{}", begin, end - 1, o.bytes.size()));
  a.body = o.bytes.substr(begin, end - begin);
  return a;
}

std::vector<std::string> BucketServer::page(const std::map<std::string, Object>& objects, const Request& r,
                                            const std::string& after, std::string& next) {
  const auto prefix = r.query.find("prefix");
  std::vector<std::string> keys;
  for (auto it = objects.lower_bound(after); it != objects.end(); ++it) {
    if (prefix != r.query.end() && !it->first.starts_with(prefix->second)) continue;
    if (static_cast<int64_t>(keys.size()) == kPage) {
      next = it->first;
      break;
    }
    keys.push_back(it->first);
  }
  return keys;
}

BucketServer::Answer BucketServer::s3(const Request& r) {
  const auto error = [&](int status, const char* code) {
    return Answer{.status = status,
                  .body = fmt::format("<?xml version=\"1.0\"?><Error><Code>{}</Code><Message>{} is what the test's "
                                      "server says</Message></Error>",
                                      code, code)};
  };
  const size_t slash = std::min(r.path.find('/', 1), r.path.size());
  const std::string bucket = r.path.substr(1, slash - 1), key = r.path.substr(std::min(slash + 1, r.path.size()));
  const auto b = buckets_.find(bucket);
  if (b == buckets_.end()) return error(404, "NoSuchBucket");
  if (!may_read(r, bucket)) return error(403, "AccessDenied");
  if (!key.empty()) {
    const auto o = b->second.find(key);
    if (o == b->second.end()) return error(404, "NoSuchKey");
    Answer a = media(r, o->second);
    a.data = r.method == "GET";
    return a;
  }
  std::string next, after = r.query.contains("continuation-token") ? r.query.at("continuation-token") : "";
  std::string body = "<?xml version=\"1.0\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
  const std::vector<std::string> keys = page(b->second, r, after, next);
  for (const std::string& k : keys) {
    const Object& o = b->second.at(k);
    body += fmt::format("<Contents><Key>{}</Key><LastModified>{}</LastModified><Size>{}</Size></Contents>", escaped(k),
                        formatted(o.modified, "%Y-%m-%dT%H:%M:%S.000Z"), o.bytes.size());
  }
  body += fmt::format("<Name>{}</Name><KeyCount>{}</KeyCount><IsTruncated>{}</IsTruncated>", bucket, keys.size(),
                      !next.empty());
  if (!next.empty()) body += "<NextContinuationToken>" + escaped(next) + "</NextContinuationToken>";
  return {.body = body + "</ListBucketResult>"};
}

BucketServer::Answer BucketServer::google(const Request& r) {
  using nlohmann::json;
  const auto error = [&](int status, const char* message) {
    return Answer{.status = status,
                  .type = "application/json",
                  .body = json{{"error", {{"code", status}, {"message", message}}}}.dump()};
  };
  // /storage/v1/b/BUCKET, …/o, …/o/KEY
  const std::string rest = r.path.substr(std::string("/storage/v1/b/").size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::string bucket = rest.substr(0, slash), what = rest.substr(slash);
  const auto b = buckets_.find(bucket);
  if (b == buckets_.end()) return error(404, "The specified bucket does not exist.");
  if (!may_read(r, bucket)) return error(403, "Anonymous caller does not have storage.objects.get access.");
  const auto about = [&](const std::string& key, const Object& o) {
    const std::string time = formatted(o.modified, "%Y-%m-%dT%H:%M:%S.000Z");
    return json{{"kind", "storage#object"}, {"name", key},
                {"bucket", bucket},         {"size", std::to_string(o.bytes.size())},
                {"updated", time},          {"timeCreated", time},
                {"generation", "1"},        {"metageneration", "1"}};
  };
  if (what.starts_with("/o/")) {
    const auto o = b->second.find(what.substr(3));
    if (o == b->second.end()) return error(404, "No such object");
    const auto alt = r.query.find("alt");
    if (alt != r.query.end() && alt->second == "media") return media(r, o->second);
    return {.type = "application/json", .body = about(o->first, o->second).dump()};
  }
  if (what == "/o") {
    std::string next, after = r.query.contains("pageToken") ? r.query.at("pageToken") : "";
    json list = {{"kind", "storage#objects"}, {"items", json::array()}};
    for (const std::string& k : page(b->second, r, after, next)) list["items"].push_back(about(k, b->second.at(k)));
    if (!next.empty()) list["nextPageToken"] = next;
    return {.type = "application/json", .body = list.dump()};
  }
  return {.type = "application/json",
          .body = json{{"kind", "storage#bucket"}, {"name", bucket}, {"id", bucket}}.dump()};
}

}  // namespace md
