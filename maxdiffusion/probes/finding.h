// The result of a probe: one line about the state of the machine, and one command that repairs a fault.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {

struct Finding {
  enum class Status { ok, warning, error };
  Status status = Status::ok;
  std::string name;   // what was checked
  std::string found;  // one line
  std::string cure;   // one command, or a key with its value; empty if there is no fault
  Code code = Code::device;
};
using Findings = std::vector<Finding>;

Finding ok(std::string name, std::string found);
Finding warning(std::string name, std::string found, std::string cure);
Finding error(std::string name, std::string found, std::string cure, Code code = Code::device);
/// An error as a finding. The cure is the first note that begins with "try: ", else `cure`.
Finding from_error(std::string name, const Error& e, std::string cure = "");

const char* to_string(Finding::Status status);
/// "ok       name          found", followed by a line "try: cure" if there is a cure.
std::string describe(const Finding& f);
nlohmann::json to_json(const Finding& f);

}  // namespace md
