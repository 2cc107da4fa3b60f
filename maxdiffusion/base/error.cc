#include "maxdiffusion/base/error.h"

#include <utility>

namespace md {

const char* to_string(Code code) {
  switch (code) {
    case Code::invalid_config: return "invalid config";
    case Code::invalid_graph: return "invalid graph";
    case Code::io: return "io";
    case Code::device: return "device";
    case Code::out_of_memory: return "out of memory";
    case Code::internal: return "internal";
  }
  return "?";
}

Error::Error(Code code, std::string message) : code_(code), message_(std::move(message)), text_(message_) {}

Error& Error::note(std::string line) {
  text_ += "\n  " + line;
  notes_.push_back(std::move(line));
  return *this;
}

}  // namespace md
