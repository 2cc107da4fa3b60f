// A storage service for tests, on its own port in threads of this process. It answers the requests that readers and
// writers send to S3 (path style; HEAD, GET with Range, ListObjectsV2; PUT, multipart uploads, copies, DELETE) and to
// Google's JSON API (objects' metadata, media, lists; resumable uploads, DELETE). Sources: "Amazon S3 API reference";
// "Cloud Storage JSON API". It reads who signed a request but does not verify signatures.
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
  /// Faults of a request for an object's bytes: none, the connection closes at once, or the body is truncated.
  enum class Fault { none, drop, truncate };
  /// Faults of a request that changes data: none, refused as by a busy server, refused permanently, cut off after half
  /// of its body, executed without an answer, or answered late.
  enum class WriteFault { none, busy, forbidden, half, unanswered, slow };

  BucketServer();
  ~BucketServer();
  BucketServer(const BucketServer&) = delete;

  /// "127.0.0.1:PORT".
  const std::string& address() const { return address_; }

  void put(const std::string& bucket, const std::string& key, const std::string& bytes,
           int64_t modified = 1'700'000'000);
  /// Puts a file, or every file below a folder.
  void put_files(const std::string& bucket, const std::string& prefix, const std::string& path);
  /// From now on only requests signed with this access key may read the bucket; "": none may.
  void lock(const std::string& bucket, const std::string& access_key);
  /// Makes the next `times` requests for bytes fail with this fault.
  void fail(Fault fault, int64_t times);
  /// After `after` more requests that change data, makes the next `times` of them fail with this fault.
  void fail_writes(WriteFault fault, int64_t times, int64_t after = 0);
  /// Calls `call` with "PUT /bucket/key", … before each request that changes data is handled; one call at a time.
  void on_write(std::function<void(const std::string& request)> call);
  /// Keys of a bucket, and the bytes of an object ("" if it does not exist).
  std::vector<std::string> keys(const std::string& bucket);
  std::string object(const std::string& bucket, const std::string& key);
  void erase(const std::string& bucket, const std::string& key);
  /// Number of multipart uploads that were started and neither completed nor aborted.
  int64_t open_uploads();
  /// Returns "GET /bucket/key", … of all requests so far, and clears the list.
  std::vector<std::string> requests();
  /// Bytes sent since the last call in answers to range requests for objects whose path contains `part`.
  int64_t bytes_sent(const std::string& part);
  /// Distinct values of the Authorization header so far.
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
  /// Reads the body after the request's head; `half`: only half of it.
  static bool receive_body(int connection, std::string& held, Request& r, bool half);
  WriteFault next_write_fault();
  Answer answer(const Request& r);
  Answer s3(const Request& r);
  Answer s3_write(const Request& r, const std::string& bucket, const std::string& key);
  Answer google(const Request& r);
  Answer google_upload(const Request& r);
  /// Requires the lock.
  void store(const std::string& bucket, const std::string& key, std::string bytes);
  Answer media(const Request& r, const Object& o) const;
  /// One page of the bucket's keys, starting after `after`; sets `next` to the start of the next page, or "".
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
  /// An upload by its number: destination and parts.
  struct Upload {
    std::string bucket, key;
    std::map<int64_t, std::string> parts;
    size_t size = 0;  // size of the finished object
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
