// A shared library that is not a plugin, to test the error message.
extern "C" int unrelated() { return 7; }
