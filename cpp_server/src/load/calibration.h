// What calls cost a server and this client, measured: what `tessera capacity` computes with.
//
// One call at a time, of several sizes, shows what a pass takes by the samples of its batch and
// what a call costs when every thread has to be woken for it; many calls in flight show what one
// costs when nobody sleeps; calls at random times, how much passes vary when CPUs sleep between
// them. All runs are cut into windows, which take turns, and what is told is the median of these: a
// usual second, and not the worst one of the measurement.
//
// Contract: calibrate blocks for as long as all its runs take.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "load/generator.h"
#include "load/request_drawer.h"
#include "package/manifest.h"

namespace tessera {

// A call failed, so that nothing is known of costs; what() says which, in a line.
class CalibrationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The JSON of docs/capacity.md. Each run takes the warm-up and the duration of `traffic`, those of
// calls at random times twice as long; those of many calls in flight have the samples of `draw` in
// a call. `loads`, ascending, are those of the runs at random times, by what the server answers
// with the most calls in flight. `http_address` is the server's HTTP port, and the server is on
// this machine. Throws UsageError, CountersError and CalibrationError.
std::string calibrate(const TrafficOptions& traffic, const std::string& http_address,
                      const Manifest& manifest, const DrawOptions& draw,
                      const std::vector<double>& loads);

}  // namespace tessera
