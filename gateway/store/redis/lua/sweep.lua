-- sweep, version 7: drops counters of limits that nobody defines and whose window is over.
--
-- KEYS     see book.lua
-- ARGV[1]  {hash, page, ids}: of limits (limits.lua); page "0" is the first; ids of those of the
--          page before that nobody defines
--
-- Returns msgpack {next page ("0" after the last), ids of this page whose window is over}.

return pack(limits().more().sweep(arg.hash, arg.page, arg.ids))
