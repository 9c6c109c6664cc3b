-- view, version 4: counters, for people and metrics; changes nothing.
--
-- KEYS     see book.lua
-- ARGV[1]  {names}
--
-- Returns {terms, book, then of each name its terms and its counters}, all msgpack, "" for absent.

local failed = load_book()
if failed then return failed end
local reply = call('HMGET', STATE, 'terms', 'book')
for _, name in ipairs(arg.names) do
  reply[#reply + 1] = call('HGET', DEFS, name) or ''
  reply[#reply + 1] = call('HGET', ACCOUNTS, name) or ''
end
return reply
