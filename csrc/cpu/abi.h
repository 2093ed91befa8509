// What every exported function is declared with.
#pragma once

#if defined(_WIN32)
#define ZEROPLAN_API extern "C" __declspec(dllexport)
#else
#define ZEROPLAN_API extern "C" __attribute__((visibility("default")))
#endif
