// The fields of requests: one list for each endpoint says what is done with each field.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace md {

struct ServedField {
  enum Fate {
    obeyed,   // the endpoint reads it
    refused,  // the request is refused unless the value is one of `off`
    ignored,  // `warnings` names it unless the value is one of `off`
  };
  std::string name;
  Fate fate = obeyed;
  std::string reason = {};  // of fields that are refused or ignored
  /// A boolean field or a text without which this field has no meaning; such a field is dropped. Empty: none.
  std::string needs = {};
  /// Values that change nothing, in addition to null. Null: false, 0, "", empty lists and objects.
  nlohmann::json off = nullptr;
};

/// The list of "/v1/images/generations", "/v1/images/edits", "/sdapi/v1/txt2img", "/sdapi/v1/img2img",
/// "/sdapi/v1/options", "/sdapi/v1/png-info", "/api/generate", and of "override_settings" in the web UI's requests.
/// Fields with the names of sampling keys are obeyed by take_keys (server/service.h) where the list has them.
const std::vector<ServedField>& served_fields(const std::string& endpoint);

/// Names of the sampling keys that a request may set.
const std::vector<std::string>& request_keys();

/// Fields that were not read yet, and what the answer warns of.
struct Fields : std::map<std::string, nlohmann::json> {
  std::vector<std::string> warnings;
};

/// Removes the fields that are not obeyed, and adds warnings of ignored and unknown ones, behind `prefix`. Throws
/// Refusal for a refused one.
void sort_fields(Fields& fields, const std::string& endpoint, const std::string& prefix = "");

}  // namespace md
