-- reap, version 5: ends leases whose time is up, charging their estimate.
--
-- KEYS     see book.lua
-- ARGV[1]  {most}: 500 at most
--
-- Returns how many.

local failed = load_book()
if failed then return failed end
local count = reap(arg.most)
if count > 0 then save() end
return count
