// What a measurement is told as: a few lines for people, one line of CSV for programs.
//
// Contract: free functions without state.
#pragma once

#include <string>

#include "load/generator.h"

namespace tessera {

std::string text_report(const TrafficOptions& options, const TrafficResult& result);

// The names of csv_line's columns.
std::string csv_header();
std::string csv_line(const TrafficOptions& options, const TrafficResult& result);

}  // namespace tessera
