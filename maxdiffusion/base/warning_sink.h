// The warnings of a request as texts, for those who do not see the log: clients of a server.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace md {

/// Collects the warnings that this thread logs while the object lives, each text once and also if it was logged before.
/// Of several objects each collects. `quiet`: they are not logged meanwhile. Must end on the thread that made it.
class WarningSink {
 public:
  explicit WarningSink(std::vector<std::string>& texts, bool quiet = false);
  ~WarningSink();
  WarningSink(const WarningSink&) = delete;
  WarningSink& operator=(const WarningSink&) = delete;
  /// Adds a warning to all of this thread's; returns whether it is to be logged.
  static bool add(std::string_view text);

 private:
  std::vector<std::string>& texts_;
  bool quiet_;
  WarningSink* outer_;
};

}  // namespace md
