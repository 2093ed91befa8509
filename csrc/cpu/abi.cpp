// The interface's version. zeroplan/core/plumbing/native.py checks it before it calls anything else.
#include "abi.h"

ZEROPLAN_API int zeroplan_abi_version(void) { return 5; }
