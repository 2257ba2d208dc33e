// All else in the library is hidden: an engine may carry it into a process that has another version of it.
#pragma once

#define TRTFUSE_EXPORT __attribute__((visibility("default")))

#ifndef TRTFUSE_ARCHITECTURES
#define TRTFUSE_ARCHITECTURES "unknown"
#endif
