-- reap, version 7: ends expired leases, charging their estimate.
--
-- KEYS     see book.lua
-- ARGV[1]  {most}: 500 at most
--
-- Returns the number of leases ended.

local failed = load_book()
if failed then return failed end
local count = reap(arg.most)
if count > 0 then save() end
return count
