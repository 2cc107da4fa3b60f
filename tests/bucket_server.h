// A storage service for tests, on a port of its own on threads of this process: the requests that readers and writers
// make of S3 (path style; HEAD, GET with Range, ListObjectsV2; PUT, uploads in parts, copies, DELETE) and of Google's
// JSON API (objects' metadata, media, lists; resumable uploads, DELETE). Sources: "Amazon S3 API reference"; "Cloud
// Storage JSON API". Signatures are not checked, only who signed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace md {

class BucketServer {
 public:
  /// What happens to a request for an object's bytes.
  enum class Fault { none, drop, truncate };
  /// What happens to a request that changes something: it is refused as by a busy server, or for good; cut off when
  /// half of its body is there, done without an answer, or answered late.
  enum class WriteFault { none, busy, forbidden, half, unanswered, slow };

  BucketServer();
  ~BucketServer();
  BucketServer(const BucketServer&) = delete;

  /// "127.0.0.1:PORT".
  const std::string& address() const { return address_; }

  void put(const std::string& bucket, const std::string& key, const std::string& bytes,
           int64_t modified = 1'700'000'000);
  /// A file, or every file below a folder.
  void put_files(const std::string& bucket, const std::string& prefix, const std::string& path);
  /// From now on only those who sign with this key may read the bucket; "": nobody.
  void lock(const std::string& bucket, const std::string& access_key);
  /// The next `times` requests for bytes fail so.
  void fail(Fault fault, int64_t times);
  /// After `after` more, the next `times` requests that change something fail so.
  void fail_writes(WriteFault fault, int64_t times, int64_t after = 0);
  /// Called with "PUT /bucket/key", … before each request that changes something is looked at; one call at a time.
  void on_write(std::function<void(const std::string& request)> call);
  /// Keys of a bucket, and the bytes of one of them ("" where it is not there).
  std::vector<std::string> keys(const std::string& bucket);
  std::string object(const std::string& bucket, const std::string& key);
  void erase(const std::string& bucket, const std::string& key);
  /// Uploads in parts that were begun and neither completed nor given up.
  int64_t open_uploads();
  /// "GET /bucket/key", … of all requests so far, and forgets them.
  std::vector<std::string> requests();
  /// Bytes that were sent since the last call in answers to requests for ranges of objects whose path has this part.
  int64_t bytes_sent(const std::string& part);
  /// Values of the Authorization header so far, without repeats.
  std::set<std::string> signers();

 private:
  struct Object {
    std::string bytes;
    int64_t modified;  // seconds since 1970
    std::string hash;
  };
  struct Request {
    std::string method, path;  // decoded, without query
    std::map<std::string, std::string> query, headers;
    std::string body;
    bool changes() const { return method == "PUT" || method == "POST" || method == "DELETE"; }
  };
  struct Answer {
    int status = 200;
    std::string type = "application/xml", body;
    std::vector<std::string> headers;
    bool data = false;  // bytes of an object
  };
  void accept_loop();
  void serve(int connection);
  static bool receive(int connection, std::string& held, Request& r);
  /// Reads what follows the head, unless the request is to be cut off.
  static bool receive_body(int connection, std::string& held, Request& r, bool half);
  WriteFault next_write_fault();
  Answer answer(const Request& r);
  Answer s3(const Request& r);
  Answer s3_write(const Request& r, const std::string& bucket, const std::string& key);
  Answer google(const Request& r);
  Answer google_upload(const Request& r);
  /// Under the lock.
  void store(const std::string& bucket, const std::string& key, std::string bytes);
  Answer media(const Request& r, const Object& o) const;
  /// Keys of a bucket from `after` on, a page of them; the key where the next begins, or "".
  static std::vector<std::string> page(const std::map<std::string, Object>& objects, const Request& r,
                                       const std::string& after, std::string& next);
  bool may_read(const Request& r, const std::string& bucket) const;

  int listener_ = -1;
  std::string address_;
  std::mutex mutex_, call_mutex_;
  std::map<std::string, std::map<std::string, Object>> buckets_;
  std::map<std::string, std::string> locks_;
  Fault fault_ = Fault::none;
  int64_t faults_left_ = 0;
  WriteFault write_fault_ = WriteFault::none;
  int64_t write_faults_left_ = 0, writes_before_ = 0;
  std::function<void(const std::string&)> on_write_;
  /// By number: where it goes, and its parts.
  struct Upload {
    std::string bucket, key;
    std::map<int64_t, std::string> parts;
    size_t size = 0;  // when it is finished
  };
  std::map<std::string, Upload> uploads_, finished_;
  int64_t uploads_begun_ = 0;
  std::vector<std::string> requests_;
  std::map<std::string, int64_t> sent_;
  std::set<std::string> signers_;
  std::set<int> connections_;
  std::vector<std::thread> threads_;
  std::thread accepting_;
  bool stopping_ = false;
};

}  // namespace md
