#include "tests/bucket_server.h"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"

namespace md {
namespace {

constexpr const char* kBusy =
    "<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>";
constexpr const char* kForbidden =
    "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code><Message>No.</Message></Error>";
constexpr int64_t kPage = 3;  // objects per page of a listing, so that tests with more need several pages

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

std::string unescaped(std::string s) {
  for (const auto& [from, to] : {std::pair{"&lt;", "<"}, std::pair{"&gt;", ">"}, std::pair{"&quot;", "\""},
                                 std::pair{"&apos;", "'"}, std::pair{"&amp;", "&"}})
    for (size_t i = 0; (i = s.find(from, i)) != std::string::npos; ++i) s.replace(i, std::string(from).size(), to);
  return s;
}

/// Decodes a chunked body: each chunk follows a line with its size, in HTTP's format and in AWS's format inside it.
std::string without_chunks(const std::string& s) {
  std::string out;
  for (size_t at = 0; at < s.size();) {
    const size_t line = s.find("\r\n", at), size = std::stoull(s.substr(at), nullptr, 16);
    if (size == 0) break;
    out += s.substr(line + 2, size);
    at = line + 2 + size + 2;
  }
  return out;
}

bool extra(int connection, std::string& held) {
  char bytes[65536];
  const ssize_t n = ::recv(connection, bytes, sizeof bytes, 0);
  if (n > 0) held.append(bytes, static_cast<size_t>(n));
  return n > 0;
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

void BucketServer::store(const std::string& bucket, const std::string& key, std::string bytes) {
  const std::string hash = content_hash(bytes);
  buckets_[bucket][key] = {std::move(bytes), std::time(nullptr), hash};
}

std::vector<std::string> BucketServer::keys(const std::string& bucket) {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all;
  for (const auto& [key, object] : buckets_[bucket]) all.push_back(key);
  return all;
}

std::string BucketServer::object(const std::string& bucket, const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto& objects = buckets_[bucket];
  const auto found = objects.find(key);
  return found == objects.end() ? "" : found->second.bytes;
}

void BucketServer::erase(const std::string& bucket, const std::string& key) {
  const std::lock_guard lock(mutex_);
  buckets_[bucket].erase(key);
}

int64_t BucketServer::open_uploads() {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(uploads_.size());
}

void BucketServer::fail_writes(WriteFault fault, int64_t times, int64_t after) {
  const std::lock_guard lock(mutex_);
  write_fault_ = fault, write_faults_left_ = times, writes_before_ = after;
}

void BucketServer::on_write(std::function<void(const std::string&)> call) {
  const std::lock_guard lock(mutex_);
  on_write_ = std::move(call);
}

BucketServer::WriteFault BucketServer::next_write_fault() {
  const std::lock_guard lock(mutex_);
  if (writes_before_ > 0) {
    --writes_before_;
    return WriteFault::none;
  }
  if (write_faults_left_ == 0) return WriteFault::none;
  --write_faults_left_;
  return write_fault_;
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

int64_t BucketServer::bytes_sent(const std::string& part) {
  const std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [path, sent] : std::exchange(sent_, {}))
    if (path.find(part) != path.npos) bytes += sent;
  return bytes;
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
  while ((end = held.find("\r\n\r\n")) == std::string::npos)
    if (!extra(connection, held)) return false;
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

bool BucketServer::receive_body(int connection, std::string& held, Request& r, bool half) {
  const auto header = [&](const char* name) {
    const auto found = r.headers.find(name);
    return found == r.headers.end() ? "" : found->second;
  };
  if (!header("expect").empty() && !send_all(connection, "HTTP/1.1 100 Continue\r\n\r\n")) return false;
  if (header("transfer-encoding") == "chunked") {
    size_t end;
    while ((end = held.find("0\r\n\r\n")) == std::string::npos || (end > 0 && held[end - 1] != '\n'))
      if (half || !extra(connection, held)) return false;
    r.body = without_chunks(held.substr(0, end + 5));
    held.erase(0, end + 5);
  } else if (const std::string size = header("content-length"); !size.empty()) {
    const size_t bytes = std::stoull(size);
    while (held.size() < (half ? bytes / 2 : bytes))
      if (!extra(connection, held)) return false;
    if (half) return false;
    r.body = held.substr(0, bytes);
    held.erase(0, bytes);
  }
  if (header("content-encoding").find("aws-chunked") != std::string::npos ||
      header("x-amz-content-sha256").starts_with("STREAMING"))
    r.body = without_chunks(r.body);
  return true;
}

void BucketServer::serve(int connection) {
  std::string held;
  for (Request r; receive(connection, held, r); r = {}) {
    WriteFault write_fault = WriteFault::none;
    if (r.changes()) {
      std::function<void(const std::string&)> call;
      {
        const std::lock_guard lock(mutex_);
        call = on_write_;
      }
      const auto name = r.query.find("name");  // the key of an upload to Google
      const std::lock_guard in_turn(call_mutex_);
      if (call) call(r.method + " " + r.path + (name == r.query.end() ? "" : "/" + name->second));
      write_fault = next_write_fault();
    }
    if (!receive_body(connection, held, r, write_fault == WriteFault::half)) return;
    if (write_fault == WriteFault::slow) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    Answer a = write_fault == WriteFault::busy        ? Answer{.status = 503, .body = kBusy}
               : write_fault == WriteFault::forbidden ? Answer{.status = 403, .body = kForbidden}
                                                      : answer(r);
    if (write_fault == WriteFault::unanswered) return;
    Fault fault = Fault::none;
    if (a.data) {
      const std::lock_guard lock(mutex_);
      if (r.headers.contains("range")) sent_[r.path] += std::ssize(a.body);
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
  const bool copies = r.headers.contains("x-amz-copy-source") || r.path.find("/rewriteTo/") != std::string::npos;
  requests_.push_back((copies ? "COPY" : r.method) + " " + r.path);
  if (r.headers.contains("authorization")) {
    const std::string& who = r.headers.at("authorization");
    const size_t key = who.find("Credential=");
    signers_.insert(key == std::string::npos ? who : who.substr(key + 11, who.find('/', key) - key - 11));
  }
  if (r.path.starts_with("/upload/storage/v1/") || r.path.starts_with("/resumable/")) return google_upload(r);
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
  if (r.changes()) return s3_write(r, bucket, key);
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

BucketServer::Answer BucketServer::s3_write(const Request& r, const std::string& bucket, const std::string& key) {
  const auto upload = r.query.contains("uploadId") ? uploads_.find(r.query.at("uploadId")) : uploads_.end();
  if (r.query.contains("uploadId") && upload == uploads_.end())
    return {.status = 404, .body = "<?xml version=\"1.0\"?><Error><Code>NoSuchUpload</Code></Error>"};
  const auto tagged = [](const std::string& bytes) {
    Answer a;
    a.headers = {fmt::format("ETag: \"{}\"", content_hash(bytes))};
    return a;
  };
  if (r.method == "POST" && r.query.contains("uploads")) {
    const std::string id = std::to_string(++uploads_begun_);
    uploads_[id] = {bucket, key, {}};
    return {.body = fmt::format("<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Bucket>{}</Bucket><Key>{}</Key>"
                                "<UploadId>{}</UploadId></InitiateMultipartUploadResult>",
                                bucket, escaped(key), id)};
  }
  if (r.method == "POST" && r.query.contains("delete")) {
    for (size_t at = 0; (at = r.body.find("<Key>", at)) != std::string::npos; ++at)
      buckets_[bucket].erase(unescaped(r.body.substr(at + 5, r.body.find("</Key>", at) - at - 5)));
    return {.body = "<?xml version=\"1.0\"?><DeleteResult></DeleteResult>"};
  }
  if (r.method == "POST") {  // completes an upload
    std::string all;
    for (const auto& [number, part] : upload->second.parts) all += part;
    uploads_.erase(upload);
    store(bucket, key, all);
    return {.body = fmt::format("<?xml version=\"1.0\"?><CompleteMultipartUploadResult><Bucket>{}</Bucket><Key>{}</Key>"
                                "<ETag>\"{}\"</ETag></CompleteMultipartUploadResult>",
                                bucket, escaped(key), content_hash(all))};
  }
  if (r.method == "DELETE") {
    if (upload != uploads_.end())
      uploads_.erase(upload);
    else
      buckets_[bucket].erase(key);
    return {.status = 204};
  }
  if (upload != uploads_.end()) {
    upload->second.parts[std::stoll(r.query.at("partNumber"))] = r.body;
    return tagged(r.body);
  }
  if (const auto source = r.headers.find("x-amz-copy-source"); source != r.headers.end()) {
    const std::string from = decoded(source->second).substr(source->second.starts_with('/') ? 1 : 0);
    store(bucket, key, buckets_[from.substr(0, from.find('/'))][from.substr(from.find('/') + 1)].bytes);
    return {.body = "<?xml version=\"1.0\"?><CopyObjectResult><ETag>\"e\"</ETag></CopyObjectResult>"};
  }
  store(bucket, key, r.body);
  return tagged(r.body);
}

BucketServer::Answer BucketServer::google_upload(const Request& r) {
  using nlohmann::json;
  const auto about = [](const Upload& u, size_t size) {
    return Answer{.type = "application/json",
                  .body = json{
                      {"kind", "storage#object"},
                      {"name", u.key},
                      {"bucket", u.bucket},
                      {"size", std::to_string(size)},
                      {"generation", "1"},
                      {"metageneration",
                       "1"}}.dump()};
  };
  if (r.method == "POST") {
    const std::string rest = r.path.substr(std::string("/upload/storage/v1/b/").size());
    Upload u{rest.substr(0, rest.find('/')), r.query.contains("name") ? r.query.at("name") : "", {{0, ""}}};
    if (!buckets_.contains(u.bucket))
      return {.status = 404,
              .type = "application/json",
              .body = json{{"error", {{"code", 404}, {"message", "The specified bucket does not exist."}}}}.dump()};
    if (!may_read(r, u.bucket))
      return {.status = 403,
              .type = "application/json",
              .body = json{{"error", {{"code", 403}, {"message", "no storage.objects.create access."}}}}.dump()};
    if (u.key.empty())
      if (const json named = json::parse(r.body, nullptr, false); named.is_object()) u.key = named.value("name", "");
    if (r.query.contains("uploadType") && r.query.at("uploadType") != "resumable") {  // metadata and bytes in one body
      const auto type = r.headers.find("content-type");
      const size_t mark = type == r.headers.end() ? std::string::npos : type->second.find("boundary=");
      std::string bytes = r.body;
      if (mark != std::string::npos) {
        const std::string boundary = "--" + type->second.substr(mark + 9);
        const size_t second = bytes.find(boundary, bytes.find(boundary) + 1),
                     begin = bytes.find("\r\n\r\n", second) + 4;
        bytes = bytes.substr(begin, bytes.rfind("\r\n" + boundary) - begin);
      }
      store(u.bucket, u.key, bytes);
      return about(u, bytes.size());
    }
    const std::string id = std::to_string(++uploads_begun_);
    uploads_[id] = u;
    Answer a{.type = "application/json", .body = "{}"};
    a.headers = {fmt::format("Location: http://{}/resumable/{}", address_, id)};
    return a;
  }
  const std::string id = r.path.substr(std::string("/resumable/").size());
  if (const auto done = finished_.find(id); done != finished_.end()) return about(done->second, done->second.size);
  const auto found = uploads_.find(id);
  if (found == uploads_.end()) return {.status = 404, .type = "application/json", .body = "{}"};
  if (r.method == "DELETE") {
    uploads_.erase(found);
    return {.status = 204};
  }
  // "bytes FIRST-LAST/TOTAL", "bytes FIRST-LAST/*", "bytes */TOTAL", "bytes */*"
  std::string& bytes = found->second.parts[0];
  const std::string range = r.headers.contains("content-range") ? r.headers.at("content-range") : "bytes */*";
  const std::string total = range.substr(range.find('/') + 1);
  if (range[6] != '*') {
    const size_t first = std::stoull(range.substr(6));
    bytes.resize(std::min(bytes.size(), first));
    bytes += r.body;
  }
  if (total != "*" && bytes.size() == std::stoull(total)) {
    store(found->second.bucket, found->second.key, bytes);
    const Upload u = finished_[id] = {found->second.bucket, found->second.key, {}, bytes.size()};
    uploads_.erase(found);
    return about(u, u.size);
  }
  Answer a{.status = 308, .type = "application/json"};
  if (!bytes.empty()) a.headers = {fmt::format("Range: bytes=0-{}", bytes.size() - 1)};
  return a;
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
  if (const size_t to = what.find("/rewriteTo/b/"); to != std::string::npos) {
    const std::string key = what.substr(what.find("/o/", to) + 3);
    store(bucket, key, b->second[what.substr(3, to - 3)].bytes);
    const std::string size = std::to_string(b->second[key].bytes.size());
    return {.type = "application/json",
            .body = json{{"kind", "storage#rewriteResponse"},
                         {"done", true},
                         {"objectSize", size},
                         {"totalBytesRewritten", size},
                         {"resource", about(key, b->second[key])}}
                        .dump()};
  }
  if (what.starts_with("/o/")) {
    const auto o = b->second.find(what.substr(3));
    if (o == b->second.end()) return error(404, "No such object");
    if (r.method == "DELETE") {
      b->second.erase(o);
      return {.status = 204, .type = "application/json"};
    }
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
