// Implementation of http_library.h.
#include <arpa/inet.h>
#include <curl/curl.h>
#include <netinet/in.h>
#include <openssl/evp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <exception>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/storage/http_library.h"

namespace md {
namespace {

constexpr long kConnectSeconds = 20, kQuietSeconds = 30, kRedirects = 10;
constexpr size_t kErrorBody = 64 << 10;

class OpensslDigest final : public Digest {
 public:
  explicit OpensslDigest(const char* name) : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    const EVP_MD* md = EVP_get_digestbyname(name);
    check(md != nullptr && EVP_DigestInit_ex(context_.get(), md, nullptr) == 1, Code::internal, "no digest '{}'", name);
  }
  void add(std::string_view bytes) override { EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()); }
  std::string hex() override {
    std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
    unsigned size = 0;
    EVP_DigestFinal_ex(context_.get(), bytes.data(), &size);
    std::string out;
    for (unsigned i = 0; i < size; ++i) out += fmt::format("{:02x}", bytes[i]);
    return out;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

/// Whether an address belongs to this machine or a private network.
bool is_local(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const uint32_t a = ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr);
    const auto in = [a](uint32_t net, int bits) { return a >> (32 - bits) == net >> (32 - bits); };
    return in(0x7f000000, 8) || in(0x0a000000, 8) || in(0xac100000, 12) || in(0xc0a80000, 16) || in(0xa9fe0000, 16) ||
           in(0x64400000, 10) || in(0, 8) || in(0xe0000000, 3);
  }
  if (address->sa_family != AF_INET6) return true;
  const in6_addr& a = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&a)) {
    sockaddr_in four{};
    four.sin_family = AF_INET;
    std::copy_n(a.s6_addr + 12, 4, reinterpret_cast<unsigned char*>(&four.sin_addr));
    return is_local(reinterpret_cast<const sockaddr*>(&four));
  }
  return IN6_IS_ADDR_LOOPBACK(&a) || IN6_IS_ADDR_UNSPECIFIED(&a) || IN6_IS_ADDR_LINKLOCAL(&a) ||
         (a.s6_addr[0] & 0xfe) == 0xfc || IN6_IS_ADDR_MULTICAST(&a);
}

struct Transfer {
  CURL* curl;
  const HttpLibrary::Body& body;
  HttpAnswer response;
  bool refused_address = false, local_addresses = true;
  std::exception_ptr thrown;

  int64_t status() const {
    long code = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &code);
    return code;
  }
};

size_t on_body(char* data, size_t, size_t size, void* user) {
  auto& t = *static_cast<Transfer*>(user);
  const int64_t status = t.status();
  if (status != 200 && status != 206) {
    t.response.error_body.append(data, std::min(size, kErrorBody - std::min(kErrorBody, t.response.error_body.size())));
    return size;
  }
  try {
    return t.body(status, {data, size}) ? size : 0;
  } catch (...) {
    t.thrown = std::current_exception();
    return 0;
  }
}

size_t on_header(char* data, size_t, size_t size, void* user) {
  auto& t = *static_cast<Transfer*>(user);
  std::string_view line(data, size);
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.remove_suffix(1);
  if (line.starts_with("HTTP/")) {  // a new response, for example after a redirect
    t.response.headers.clear();
    t.response.error_body.clear();
    return size;
  }
  const size_t colon = line.find(':');
  if (colon == line.npos) return size;
  std::string name(line.substr(0, colon));
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  line.remove_prefix(colon + 1);
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.front()))) line.remove_prefix(1);
  t.response.headers[name] = line;
  return size;
}

curl_socket_t on_open(void* user, curlsocktype, curl_sockaddr* address) {
  auto& t = *static_cast<Transfer*>(user);
  if (!t.local_addresses && is_local(&address->addr)) {
    t.refused_address = true;
    return CURL_SOCKET_BAD;
  }
  return ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

/// The file of certificate authorities: SSL_CERT_FILE, else the system's if it is at a path that curl was not built
/// with; empty: curl's default.
std::string authorities_file() {
  if (const char* named = std::getenv("SSL_CERT_FILE"); named && *named) return named;
  for (const char* file : {"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
                           "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"})
    if (::access(file, R_OK) == 0) return file;
  return "";
}

class Curl final : public HttpLibrary {
 public:
  Curl() { curl_global_init(CURL_GLOBAL_DEFAULT); }

  HttpAnswer get(const HttpRequest& request, const Body& body) const override {
    const std::unique_ptr<CURL, void (*)(CURL*)> curl(curl_easy_init(), curl_easy_cleanup);
    Transfer t{curl.get(), body, {}, false, request.local_addresses, {}};
    std::array<char, CURL_ERROR_SIZE> words{};
    const auto set = [&](CURLoption option, auto value) { curl_easy_setopt(curl.get(), option, value); };
    const bool secure = request.url.starts_with("https:");
    set(CURLOPT_URL, request.url.c_str());
    if (const std::string authorities = authorities_file(); !authorities.empty())
      set(CURLOPT_CAINFO, authorities.c_str());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_REDIR_PROTOCOLS_STR, secure ? "https" : "http,https");
    set(CURLOPT_FOLLOWLOCATION, 1L);
    set(CURLOPT_MAXREDIRS, kRedirects);
    set(CURLOPT_CONNECTTIMEOUT, kConnectSeconds);
    set(CURLOPT_LOW_SPEED_LIMIT, 1L);
    set(CURLOPT_LOW_SPEED_TIME, kQuietSeconds);
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_USERAGENT, "maxdiffusion");
    set(CURLOPT_ERRORBUFFER, words.data());
    set(CURLOPT_WRITEFUNCTION, on_body);
    set(CURLOPT_WRITEDATA, static_cast<void*>(&t));
    set(CURLOPT_HEADERFUNCTION, on_header);
    set(CURLOPT_HEADERDATA, static_cast<void*>(&t));
    set(CURLOPT_OPENSOCKETFUNCTION, on_open);
    set(CURLOPT_OPENSOCKETDATA, static_cast<void*>(&t));
    if (!request.local_addresses) set(CURLOPT_PROXY, "");  // a proxy would hide the host's address
    if (!request.token.empty()) {
      set(CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
      set(CURLOPT_XOAUTH2_BEARER, request.token.c_str());
    }
    const std::string range = fmt::format("{}-", request.offset);
    if (request.offset > 0) set(CURLOPT_RANGE, range.c_str());
    const CURLcode code = curl_easy_perform(curl.get());
    if (t.thrown) std::rethrow_exception(t.thrown);
    if (code == CURLE_OK)
      t.response.status = t.status();
    else
      t.response.failure = t.refused_address ? "an address of this machine or of a private network"
                           : words[0] != 0   ? words.data()
                                             : curl_easy_strerror(code);
    return std::move(t.response);
  }

  std::unique_ptr<Digest> digest(const char* name) const override { return std::make_unique<OpensslDigest>(name); }
};

}  // namespace
}  // namespace md

extern "C" md::HttpLibrary* md_http_library() {
  static md::Curl library;
  return &library;
}
