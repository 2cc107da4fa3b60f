#include "maxdiffusion/probes/finding.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace md {

Finding ok(std::string name, std::string found) {
  return {Finding::Status::ok, std::move(name), std::move(found), "", Code::internal};
}

Finding warning(std::string name, std::string found, std::string cure) {
  return {Finding::Status::warning, std::move(name), std::move(found), std::move(cure), Code::internal};
}

Finding error(std::string name, std::string found, std::string cure, Code code) {
  return {Finding::Status::error, std::move(name), std::move(found), std::move(cure), code};
}

Finding from_error(std::string name, const Error& e, std::string cure) {
  std::string found = e.message();
  for (const std::string& note : e.notes()) {
    if (note.starts_with("try: ")) {
      cure = note.substr(5);
      break;
    }
    found += "; " + note;
  }
  return error(std::move(name), std::move(found), std::move(cure), e.code());
}

const char* to_string(Finding::Status status) {
  switch (status) {
    case Finding::Status::ok: return "ok";
    case Finding::Status::warning: return "warning";
    case Finding::Status::error: return "error";
  }
  return "error";
}

std::string describe(const Finding& f) {
  std::string line = fmt::format("{:<8} {:<18} ", to_string(f.status), f.name);
  for (const char c : f.found) line += c == '\n' ? ' ' : c;
  if (!f.cure.empty()) line += fmt::format("\n{:28}try: {}", "", f.cure);
  return line;
}

nlohmann::json to_json(const Finding& f) {
  nlohmann::json j = {{"status", to_string(f.status)}, {"name", f.name}, {"found", f.found}};
  if (!f.cure.empty()) j["try"] = f.cure;
  return j;
}

}  // namespace md
