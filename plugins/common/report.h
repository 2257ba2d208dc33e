// Messages to TensorRT's logger. Nothing here throws across the C ABI.
#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <stdexcept>
#include <string>

namespace trtfuse {

/// What a plugin cannot do, in one line.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

using Severity = nvinfer1::ILogger::Severity;

/// The logger that TensorRT offers; null: back to standard error.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;
void report(Severity severity, const std::string& message) noexcept;

/// Runs body and gives its result; what it throws is reported as "<name>: <what>", and `failed` given.
template <typename Result, typename Body>
Result guarded(const char* name, Result failed, Body body) noexcept {
    try {
        return body();
    } catch (const std::exception& e) {
        try {
            report(Severity::kERROR, std::string(name) + ": " + e.what());
        } catch (...) {  // no memory for the message: the status must say it
        }
    } catch (...) {
        report(Severity::kERROR, name);
    }
    return failed;
}

}  // namespace trtfuse
