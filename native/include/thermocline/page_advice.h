// Which pages of a mapped file are brought into memory, which may leave it, and which are there.
#pragma once

#include <cstdint>

namespace thermocline {

// Reads the pages of bytes [start, end) of a mapping into memory and maps them; returns when they are
// there. Where the kernel can not do that (before Linux 5.14) they are only asked for. Returns the bytes
// of those pages, or -errno.
int64_t fetch_pages(const uint8_t* base, int64_t start, int64_t end);

// Lets missing pages of bytes [start, end) of a mapping come in huge pages of 2 MiB. Returns their bytes, or -errno: EINVAL from kernels without such pages.
int64_t allow_huge_pages(const uint8_t* base, int64_t start, int64_t end);

// As fetch_pages, where `allow_huge_pages` did: in huge pages, so that neighbours of the bytes come too, for a tenth of the
// processor's time. Where the kernel brings single pages all the same, it is fetch_pages from the second call on; where
// parts of new ones are slow at their first use, for many calls.
int64_t fetch_huge_pages(const uint8_t* base, int64_t start, int64_t end);

// Asks for the pages of bytes [start, end) of a mapping, and does not wait. Returns their bytes, or -errno.
int64_t ask_for_pages(const uint8_t* base, int64_t start, int64_t end);

// Lets go of the pages that lie wholly inside bytes [start, end): they leave this process's view, and
// memory if nobody else has them mapped. Returns the bytes of those pages, or -errno. Does nothing, and says
// nothing, where this process neither owns the file nor may write to it.
int64_t release_pages(const uint8_t* base, int64_t start, int64_t end);

// Takes the pages that lie wholly inside bytes [start, end) out of this process's view; they stay in memory,
// and are let go sooner. Returns the bytes of those pages, or -errno.
int64_t unmap_pages(const uint8_t* base, int64_t start, int64_t end);

// Tells the kernel that bytes [start, end) of a mapping are not read in order: a page that is missing comes
// alone, without its neighbours. Also a page that lies partly inside: it would bring megabytes of both sides.
// Returns their bytes, or -errno.
int64_t stop_read_ahead(const uint8_t* base, int64_t start, int64_t end);

// How many of the pages that hold these bytes of a mapping are in memory, or -errno. All, where this process
// neither owns the file nor may write to it.
int64_t resident_pages(const uint8_t* base, const int64_t* offsets, int64_t count);

// The same for any file: a page that is missing is read, and counted as missing however fast it comes. Waits for it.
int64_t pages_read_at_once(const uint8_t* base, const int64_t* offsets, int64_t count);

}  // namespace thermocline
