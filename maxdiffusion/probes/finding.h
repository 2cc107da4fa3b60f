// What a probe has found of a machine: one line that says how it is, and one command that mends it where it is not
// well.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {

struct Finding {
  enum class Status { ok, warning, error };
  Status status = Status::ok;
  std::string name;   // what was looked at
  std::string found;  // one line
  std::string cure;   // one command, or a key with its value; empty where all is well
  Code code = Code::device;
};
using Findings = std::vector<Finding>;

Finding ok(std::string name, std::string found);
Finding warning(std::string name, std::string found, std::string cure);
Finding error(std::string name, std::string found, std::string cure, Code code = Code::device);
/// An error as it is; the first of its notes that begins with "try: " is the cure, or else `cure`.
Finding from_error(std::string name, const Error& e, std::string cure = "");

const char* to_string(Finding::Status status);
/// "ok       name          found", and below it "try: cure".
std::string describe(const Finding& f);
nlohmann::json to_json(const Finding& f);

}  // namespace md
