#include "maxdiffusion/server/http/framing.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <map>
#include <utility>

namespace md {
namespace {

/// A character of a method or a header's name.
bool is_token(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) ||
         std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

/// Headers that say where a request ends, for whom and from whom it is: once only.
constexpr std::string_view kOnce[] = {
    "host", "content-length", "transfer-encoding", "content-type", "authorization", "x-api-key", "origin", "expect"};

}  // namespace

HeadFraming check_head(std::string_view head) {
  std::map<std::string, std::string> once;
  bool first = true, newest = true;
  while (!head.empty()) {
    const size_t end = head.find('\n');
    if (end == head.npos || end == 0 || head[end - 1] != '\r') return {"a line of the head does not end with CR LF"};
    const std::string_view line = head.substr(0, end - 1);
    head.remove_prefix(end + 1);
    if (std::ranges::any_of(line, [](unsigned char c) { return (c < 0x20 && c != '\t') || c == 0x7f; }))
      return {"the head has a control character"};
    if (std::exchange(first, false)) {
      newest = line.ends_with(" HTTP/1.1");
      if (!newest && !line.ends_with(" HTTP/1.0")) return {"the request line is not of HTTP/1.1"};
      if (std::ranges::count(line, ' ') != 2) return {"the request line is not METHOD PATH HTTP/1.1"};
      if (line.empty() || !is_token(line[0])) return {"the request line does not begin with a method"};
      continue;
    }
    if (line.empty()) break;
    const size_t colon = line.find(':');
    if (colon == line.npos || colon == 0 || !std::ranges::all_of(line.substr(0, colon), is_token))
      return {"a header is not of the form NAME: VALUE"};  // also one that is continued on a further line
    std::string name(line.substr(0, colon));
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
    if (std::ranges::find(kOnce, name) == std::end(kOnce)) continue;
    std::string_view value = line.substr(colon + 1);
    value.remove_prefix(std::min(value.find_first_not_of(" \t"), value.size()));
    value = value.substr(0, value.find_last_not_of(" \t") + 1);
    if (!once.emplace(name, value).second) return {"the header " + name + " is given twice"};
  }
  if (newest && !once.contains("host")) return {"the header host is missing"};
  const auto length = once.find("content-length"), encoding = once.find("transfer-encoding");
  if (length != once.end() && encoding != once.end()) return {"both content-length and transfer-encoding are given"};
  if (length != once.end()) {
    const std::string& digits = length->second;
    if (digits.empty() || digits.size() > 18 ||
        !std::ranges::all_of(digits, [](unsigned char c) { return std::isdigit(c); }))
      return {"content-length is not a number of bytes"};
  }
  if (encoding == once.end()) return {};
  std::string how = encoding->second;
  std::ranges::transform(how, how.begin(), [](unsigned char c) { return std::tolower(c); });
  if (how != "chunked" || !newest) return {"transfer-encoding is not chunked, of HTTP/1.1"};
  return {.error = {}, .chunked = true};
}

bool ChunkFraming::takes(std::string_view bytes) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    const char c = bytes[i];
    switch (at_) {
      case At::size:
        if (std::isxdigit(static_cast<unsigned char>(c)) && digits_ < 15) {
          size_ = size_ * 16 +
                  static_cast<uint64_t>(std::isdigit(static_cast<unsigned char>(c)) ? c - '0' : (c | 32) - 'a' + 10);
          ++digits_;
        } else if (digits_ > 0 && (c == ';' || c == '\r')) {
          at_ = c == ';' ? At::extension : At::size_end;
        } else {
          at_ = At::broken;
        }
        break;
      case At::extension:
        if (c == '\r')
          at_ = At::size_end;
        else if (static_cast<unsigned char>(c) < 0x20 && c != '\t')
          at_ = At::broken;
        break;
      case At::size_end: at_ = c != '\n' ? At::broken : size_ > 0 ? At::data : At::trailer; break;
      case At::data: {
        const uint64_t n = std::min<uint64_t>(size_, bytes.size() - i);
        size_ -= n, i += n - 1;
        if (size_ == 0) at_ = At::data_end;
        break;
      }
      case At::data_end: at_ = c == '\r' ? At::data_line : At::broken; break;
      case At::data_line:
        at_ = c == '\n' ? At::size : At::broken;
        digits_ = 0;
        break;
      case At::trailer:
        if (c == '\r')
          at_ = At::trailer_end;
        else
          empty_line_ = false, at_ = c == '\n' ? At::broken : At::trailer;
        break;
      case At::trailer_end:
        at_ = c != '\n' ? At::broken : empty_line_ ? At::done : At::trailer;
        empty_line_ = true;
        break;
      case At::done: break;  // behind the request; the connection is closed
      case At::broken: return false;
    }
  }
  return at_ != At::broken;
}

}  // namespace md
