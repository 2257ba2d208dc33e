#include "report.h"

#include <atomic>
#include <cstdio>

namespace trtfuse {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> finder_{nullptr};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { finder_ = finder; }

void report(Severity severity, const std::string& message) noexcept {
    try {
        nvinfer1::ILoggerFinder* finder = finder_;
        nvinfer1::ILogger* logger = finder != nullptr ? finder->findLogger() : nullptr;
        if (logger != nullptr) return logger->log(severity, message.c_str());
    } catch (...) {  // a logger that throws is no reason to lose the message
    }
    std::fprintf(stderr, "trtfuse: %s\n", message.c_str());
}

}  // namespace trtfuse
