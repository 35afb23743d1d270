// tessera-load: sends random requests to a server and measures it; see --help.
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/flags.h"
#include "load/calibration.h"
#include "load/call_record.h"
#include "load/drawn_requests.h"
#include "load/generator.h"
#include "load/replay.h"
#include "load/report.h"
#include "load/request_drawer.h"
#include "load/request_file.h"
#include "load/server_counters.h"
#include "package/manifest.h"
#include "package/package_error.h"

namespace {

using tessera::Flag;

// With the least, CPUs sleep between calls, and passes find colder caches than those of calls that
// follow one another; with the others threads wait for CPUs, as the system shares them.
const std::vector<double> kCalibrateLoads = {0.25, 0.5, 0.75, 0.9};

struct Settings {
  std::string model_file;
  std::string request_file;
  std::string replay;
  double speed = 0;  // 0: not given
  std::string record;
  std::string csv;
  std::string calibrate;
  std::vector<double> calibrate_loads;  // empty: not given
  std::string http_address;
  tessera::TrafficOptions traffic;
  tessera::DrawOptions draw;
  std::int64_t timeout_ms = 5'000;
  bool help = false;
};

Flag seconds_flag(const std::string& name, const std::string& help, tessera::Duration& target) {
  return {name, "S", tessera::text(help, ", seconds (default: ", tessera::seconds(target), ")"),
          [=, &target](const std::string& value) {
            const auto given = tessera::parse_number<double>(name, value);
            if (!(given >= 0 && given < 1e6)) {
              tessera::refuse_flag(name, value, "give seconds from 0 to 1000000");
            }
            target =
                std::chrono::duration_cast<tessera::Duration>(std::chrono::duration<double>(given));
          }};
}

// The header that shows the token of a file.
std::string authorization_of(const std::string& path) {
  std::ifstream file(path);
  std::string token;
  if (!(file >> token)) {
    tessera::refuse_flag("token-file", "'" + path + "'", "give a file that holds a token");
  }
  return "Bearer " + token;
}

std::vector<double> loads_of(const std::string& value) {
  std::vector<double> loads;
  std::istringstream parts(value);
  for (std::string part; std::getline(parts, part, ',');) {
    const double before = loads.empty() ? 0 : loads.back();
    loads.push_back(tessera::parse_number<double>("calibrate-loads", part));
    if (!(loads.back() > before && loads.back() < 1)) {
      tessera::refuse_flag("calibrate-loads", value, "give ascending numbers above 0 and below 1");
    }
  }
  if (loads.empty()) {
    tessera::refuse_flag("calibrate-loads", "''", "give a number, or several with commas");
  }
  return loads;
}

std::vector<Flag> flags(Settings& s) {
  using tessera::number_flag;
  return {
      {"address", "HOST:PORT", "the server's gRPC address, or unix:PATH",
       [&](const std::string& value) { s.traffic.address = value; }},
      {"model-file", "MODEL.pt", "the served package, for its features",
       [&](const std::string& value) { s.model_file = value; }},
      {"requests", "FILE",
       "instead of --model-file: send the messages of this file in turn, each after its size (4 "
       "bytes, "
       "little-endian)",
       [&](const std::string& value) { s.request_file = value; }},
      {"method", "/SERVICE/METHOD",
       "for --requests: the method that they are for (default: " + s.traffic.method + ")",
       [&](const std::string& value) {
         if (!value.starts_with('/')) {
           tessera::refuse_flag("method", "'" + value + "'", "give /package.Service/Method");
         }
         s.traffic.method = value;
       }},
      {"replay", "FILE|DIR",
       "instead of --model-file: send the requests that a server has recorded there "
       "(docs/replay.md) "
       "at their "
       "recorded times, each once, or in turn where --rate says how many a second",
       [&](const std::string& value) { s.replay = value; }},
      {"speed", "X",
       "for --replay: how fast time passes; 2: twice as many requests a second as were recorded "
       "(default: 1)",
       [&](const std::string& value) {
         s.speed = tessera::parse_number<double>("speed", value);
         if (!(s.speed >= 1e-3 && s.speed <= 1e6)) {
           tessera::refuse_flag("speed", value, "give a number from 0.001 to 1000000");
         }
       }},
      {"record", "FILE",
       "write each measured call with its answer to FILE (default: none); load/call_record.h has "
       "its "
       "form",
       [&](const std::string& value) { s.record = value; }},
      {"rate", "R",
       "open loop: requests per second, sent whether or not earlier ones were answered "
       "(default: closed loop)",
       [&](const std::string& value) {
         s.traffic.rate = tessera::parse_number<double>("rate", value);
         if (!(s.traffic.rate > 0 && s.traffic.rate < 1e8)) {
           tessera::refuse_flag("rate", value, "give a positive number of requests per second");
         }
       }},
      {"arrivals", "{poisson,constant}", "open loop: how requests are spaced (default: poisson)",
       [&](const std::string& value) {
         if (value != "poisson" && value != "constant") {
           tessera::refuse_flag("arrivals", "'" + value + "'", "give poisson or constant");
         }
         s.traffic.poisson = value == "poisson";
       }},
      number_flag("in-flight", "closed loop: requests in flight, over all connections",
                  s.traffic.in_flight, 1, 1'000'000),
      number_flag("connections", "connections, each with a thread", s.traffic.connections, 1,
                  1'024),
      number_flag("samples", "samples of a request", s.draw.samples, 1, 1'000'000),
      {"ids-per-bag", "N[,N...]",
       "ids of each sample, for all features or for each in the schema's order (default: 1)",
       [&](const std::string& value) {
         s.draw.ids_per_bag.clear();
         std::istringstream parts(value);
         for (std::string part; std::getline(parts, part, ',');) {
           s.draw.ids_per_bag.push_back(
               tessera::checked_number<std::int64_t>("ids-per-bag", part, 0, 1'000));
         }
         if (s.draw.ids_per_bag.empty()) {
           tessera::refuse_flag("ids-per-bag", "''", "give a whole number, or several with commas");
         }
       }},
      {"int32-ids", "", "send ids as int32 (default: as int64)",
       [&](const std::string&) { s.draw.int32_ids = true; }},
      number_flag("shared-features", "features given once per request, the first ones",
                  s.draw.shared_features, 0),
      seconds_flag("warm-up-s", "load before the measurement", s.traffic.warm_up),
      seconds_flag("duration-s", "length of the measurement", s.traffic.duration),
      number_flag("timeout-ms", "time limit of a request, milliseconds", s.timeout_ms, 1,
                  3'600'000),
      number_flag("seed", "seed of requests and arrivals", s.traffic.seed, 0),
      {"tls-ca", "FILE",
       "the authorities that the server's certificate is held against, in PEM (default: no TLS)",
       [&](const std::string& value) { s.traffic.tls.ca = value; }},
      {"tls-cert", "FILE",
       "this client's certificate, in PEM, where the server asks for one (default: none)",
       [&](const std::string& value) { s.traffic.tls.cert = value; }},
      {"tls-key", "FILE", "the private key of --tls-cert, in PEM (default: none)",
       [&](const std::string& value) { s.traffic.tls.key = value; }},
      {"token-file", "FILE",
       "a file whose first word is the token that each call shows (default: none)",
       [&](const std::string& value) { s.traffic.authorization = authorization_of(value); }},
      {"csv", "FILE", "append a line of CSV to FILE, with a header where it is new",
       [&](const std::string& value) { s.csv = value; }},
      {"calibrate", "FILE",
       "measure what calls of several sizes cost the server and this client, alone and many at "
       "once, "
       "and write it to FILE for tessera capacity; each of eight runs or less takes --warm-up-s "
       "and "
       "--duration-s, and each of --calibrate-loads twice as long",
       [&](const std::string& value) { s.calibrate = value; }},
      {"calibrate-loads", "X[,X...]",
       "for --calibrate: the loads of the runs of calls at random times, ascending, by what the "
       "server answers with four calls in flight for each CPU (default: 0.25,0.5,0.75,0.9)",
       [&](const std::string& value) { s.calibrate_loads = loads_of(value); }},
      {"http-address", "HOST:PORT",
       "for --calibrate: the server's HTTP port on this machine, whose metrics tell the CPU time "
       "that it uses",
       [&](const std::string& value) { s.http_address = value; }},
      {"help", "", "print this and exit", [&](const std::string&) { s.help = true; }},
  };
}

std::string usage() {
  Settings defaults;
  return "usage: tessera-load --address HOST:PORT --model-file MODEL.pt [flags]\n\n"
         "Send random requests, or those of a file, to a server and print throughput and "
         "latency.\n\n"
         "With --rate, latency counts from the time at which a request should have been sent,\n"
         "so that a slow server cannot slow the measurement down; without it a fixed number of\n"
         "requests is always in flight.\n\n"
         "Exit status: 0 every request was answered; 1 some were not; 2 a flag, the address or\n"
         "the file has to be changed.\n\nflags:\n" +
         tessera::flags_text(flags(defaults));
}

void append_csv(const Settings& settings, const tessera::TrafficResult& result) {
  std::ofstream out(settings.csv, std::ios::app);
  if (!out) throw tessera::UsageError("--csv is " + settings.csv + "; it cannot be written");
  if (out.tellp() == 0) out << tessera::csv_header();
  out << tessera::csv_line(settings.traffic, result);
}

tessera::Manifest manifest_of(const Settings& settings) {
  const tessera::PackageFile file(settings.model_file);
  return tessera::read_manifest(tessera::Records(file));
}

// Random requests of the package's schema.
std::vector<std::string> requests_of_package(const Settings& settings) {
  return tessera::drawn_requests(manifest_of(settings).schema, settings.draw,
                                 settings.traffic.seed);
}

// Refuses flags that a calibration does not look at, and one without its address.
void check_calibration(const Settings& settings) {
  if (settings.calibrate.empty() != settings.http_address.empty()) {
    throw tessera::UsageError("--calibrate and --http-address need each other; give both");
  }
  if (settings.calibrate.empty() && !settings.calibrate_loads.empty()) {
    throw tessera::UsageError("--calibrate-loads is for --calibrate; give both");
  }
  if (settings.calibrate.empty()) return;
  if (settings.model_file.empty() || settings.traffic.rate > 0 || !settings.record.empty() ||
      !settings.csv.empty() || !settings.traffic.tls.ca.empty()) {
    throw tessera::UsageError(
        "--calibrate draws requests of --model-file and sends them one after another over "
        "connections that are not encrypted; leave out --requests, --rate, --record, --csv and "
        "--tls-ca");
  }
}

int run_calibration(const Settings& settings) {
  const std::vector<double>& loads = settings.calibrate_loads;
  const tessera::Manifest manifest = manifest_of(settings);
  // Opened now, and not when a minute of measuring is over. A file of costs that is there stays as
  // it is until there are others.
  const std::string partial = settings.calibrate + ".partial";
  std::ofstream out(partial);
  if (!out) tessera::refuse_flag("calibrate", settings.calibrate, "it cannot be written");
  try {
    out << tessera::calibrate(settings.traffic, settings.http_address, manifest, settings.draw,
                              loads.empty() ? kCalibrateLoads : loads);
    out.close();
    if (!out) {
      tessera::refuse_flag("calibrate", settings.calibrate, "it could not be written to its end");
    }
    std::filesystem::rename(partial, settings.calibrate);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw;
  }
  std::cout << "wrote " << settings.calibrate << "\n";
  return 0;
}

// Refuses files of TLS that are given without others that they need.
void check_tls(const tessera::TlsFiles& tls) {
  if (tls.cert.empty() != tls.key.empty()) {
    const bool cert = tls.key.empty();
    throw tessera::UsageError(tessera::text("--tls-", cert ? "cert" : "key",
                                            " is given without --tls-", cert ? "key" : "cert",
                                            "; give both"));
  }
  if (!tls.cert.empty() && tls.ca.empty()) {
    throw tessera::UsageError(
        "--tls-cert is given without --tls-ca; name the authority of the server's certificate");
  }
}

// Refuses flags that a replay does not look at, and --speed without recorded times.
void check_replay(const Settings& settings) {
  const tessera::TrafficOptions defaults;
  const bool timed = !settings.replay.empty() && settings.traffic.rate == 0;
  if (settings.speed > 0 && !timed) {
    throw tessera::UsageError("--speed is for --replay without --rate; leave it out");
  }
  if (!settings.replay.empty() && settings.traffic.method != defaults.method) {
    throw tessera::UsageError("--method is for --requests; recorded requests have their own");
  }
  if (timed && (settings.traffic.warm_up != defaults.warm_up ||
                settings.traffic.duration != defaults.duration)) {
    throw tessera::UsageError(
        "--replay without --rate sends and measures every recorded request; leave out --warm-up-s "
        "and --duration-s, or add --rate");
  }
}

// The messages of the recording, whose methods and times the traffic has from now on.
std::vector<std::string> replayed(Settings& settings, tessera::Recording& recording) {
  recording = tessera::read_recording(settings.replay);
  if (recording.cut_files > 0) {
    std::cerr << "tessera-load: " << recording.cut_files
              << " files were cut; they were read up to their last whole request\n";
  }
  if (settings.speed > 0) {
    for (tessera::Duration& at : recording.at) {
      at = std::chrono::duration_cast<tessera::Duration>(at / settings.speed);
    }
  }
  settings.traffic.methods = &recording.methods;
  if (settings.traffic.rate == 0) settings.traffic.schedule = &recording.at;
  return std::move(recording.messages);
}

int run(Settings& settings) {
  check_tls(settings.traffic.tls);
  check_calibration(settings);
  check_replay(settings);
  if (!settings.calibrate.empty()) return run_calibration(settings);
  const bool drawn = !settings.model_file.empty();
  tessera::Recording recording;
  const std::vector<std::string> requests = drawn ? requests_of_package(settings)
                                            : settings.replay.empty()
                                                ? tessera::read_request_file(settings.request_file)
                                                : replayed(settings, recording);
  std::optional<tessera::CallRecord> record;
  if (!settings.record.empty()) settings.traffic.record = &record.emplace(settings.record);
  const tessera::TrafficResult result =
      tessera::run_traffic(settings.traffic, requests, drawn ? settings.draw.samples : 0);
  if (record) record->close();
  std::cout << tessera::text_report(settings.traffic, result);
  if (!settings.csv.empty()) append_csv(settings, result);
  const bool all =
      result.codes.size() == 1 && result.codes.contains("OK") && result.answers_wrong_size == 0;
  return all ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Settings settings;
    tessera::set_flags(flags(settings), std::vector<std::string>(argv + 1, argv + argc));
    if (settings.help) {
      std::cout << usage();
      return 0;
    }
    const int sources = (settings.model_file.empty() ? 0 : 1) +
                        (settings.request_file.empty() ? 0 : 1) + (settings.replay.empty() ? 0 : 1);
    if (settings.traffic.address.empty() || sources != 1) {
      throw tessera::UsageError(
          "--address and one of --model-file, --requests and --replay are needed; see --help");
    }
    settings.traffic.timeout = std::chrono::milliseconds(settings.timeout_ms);
    return run(settings);
  } catch (const tessera::UsageError& error) {
    std::cerr << "tessera-load: error: " << error.what() << '\n';
    return 2;
  } catch (const tessera::CountersError& error) {
    std::cerr << "tessera-load: error: " << error.what() << '\n';
    return 1;
  } catch (const tessera::CalibrationError& error) {
    std::cerr << "tessera-load: error: " << error.what() << '\n';
    return 1;
  } catch (const tessera::PackageError& error) {
    std::cerr << "tessera-load: error: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "tessera-load: bug: " << error.what() << '\n';
    return 1;
  }
}
