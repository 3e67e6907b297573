// What libstdc++'s headers take from glibc 2.32, for wheels that are linked against 2.28 (scripts/wheel.sh).
// 0 is always right: reference counts are then atomic also where there is one thread.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
