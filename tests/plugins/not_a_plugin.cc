// A shared library that is no plugin, for the test that says so.
extern "C" int unrelated() { return 7; }
