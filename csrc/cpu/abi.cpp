// The interface's version, checked by zeroplan/core/native.py before anything is called.
#include "abi.h"

ZEROPLAN_API int zeroplan_abi_version(void) { return 5; }
