// Catch2, v2 or v3.
#pragma once

#ifdef MLPO_CATCH3
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
