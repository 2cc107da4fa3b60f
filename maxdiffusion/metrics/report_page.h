// The page of `report`: its style and its script; report.cc replaces the placeholder for the data.
#pragma once

namespace md {

extern const char* const kReportPage;

}  // namespace md
