// What a thread died of that is not Python's, such as one of Gloo's that gets a longer message than it expects, or
// NCCL's watchdog.
#pragma once

#include <string>

namespace moe_opt {

// An exception that nobody catches, and who calls abort(), end the process, and nobody says which rank that was, or
// where. From now on the thread waits some seconds before, in which another one can say so and end the process better.
void keep_uncaught_exceptions();

// What it was: "an exception: " with its message, or SIGABRT; empty: there has been none.
std::string uncaught_exception();

// Has such a thread go on to the end of the process as if nobody had looked, with the handlers that were there before.
void let_end();

}  // namespace moe_opt
