// <condition_variable>, for every file that waits on one. Since GCC 12 libstdc++ has a newer version of
// condition_variable::wait (GLIBCXX_3.4.30: the same, but noexcept). It would be the only symbol that keeps
// the module from hosts with GCC 11's libstdc++ (RHEL 9, Amazon Linux 2023), so the older version is bound.
#pragma once

#include <condition_variable>

#if defined(__x86_64__) && defined(__GLIBCXX__)
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
