// A storage service for tests, on a port of its own on threads of this process: the requests that readers make of S3
// (path style; HEAD, GET with Range, ListObjectsV2) and of Google's JSON API (objects' metadata, media, lists).
// Sources: "Amazon S3 API reference"; "Cloud Storage JSON API". Signatures are not checked, only who signed.
#pragma once

#include <atomic>
#include <cstdint>
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
  /// "GET /bucket/key", … of all requests so far, and forgets them.
  std::vector<std::string> requests();
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
  Answer answer(const Request& r);
  Answer s3(const Request& r);
  Answer google(const Request& r);
  Answer media(const Request& r, const Object& o) const;
  /// Keys of a bucket from `after` on, a page of them; the key where the next begins, or "".
  static std::vector<std::string> page(const std::map<std::string, Object>& objects, const Request& r,
                                       const std::string& after, std::string& next);
  bool may_read(const Request& r, const std::string& bucket) const;

  int listener_ = -1;
  std::string address_;
  std::mutex mutex_;
  std::map<std::string, std::map<std::string, Object>> buckets_;
  std::map<std::string, std::string> locks_;
  Fault fault_ = Fault::none;
  int64_t faults_left_ = 0;
  std::vector<std::string> requests_;
  std::set<std::string> signers_;
  std::set<int> connections_;
  std::vector<std::thread> threads_;
  std::thread accepting_;
  bool stopping_ = false;
};

}  // namespace md
