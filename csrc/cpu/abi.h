// The declaration that every exported function starts with.
#pragma once

#if defined(_WIN32)
#define ZEROPLAN_API extern "C" __declspec(dllexport)
#else
#define ZEROPLAN_API extern "C" __attribute__((visibility("default")))
#endif
