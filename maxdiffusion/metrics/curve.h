// Line plots as PNG files.
#pragma once

#include <string>
#include <vector>

namespace md {

struct Curve {
  std::string name;  // in the legend; empty: not listed
  std::vector<double> x, y;
  bool faint = false;  // a pale, fine line, for raw values under a smoothed curve of the same colour
};
/// A line plot with axes, ticks and a legend, as PNG. `log_y`: logarithmic y axis. Points that are not finite (or not
/// positive, with log_y) break the line.
void write_curve_png(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::string& y_label, const std::vector<Curve>& curves, bool log_y = false);

/// Weighted mean around each value; symmetric weights that fall to 1/e at a distance of `horizon` values, so without
/// lag.
std::vector<double> smoothed(const std::vector<double>& values, double horizon);

/// Tick positions inside [low, high], spaced by 1, 2 or 5 times a power of ten; at most `most`.
std::vector<double> axis_ticks(double low, double high, int most);

}  // namespace md
