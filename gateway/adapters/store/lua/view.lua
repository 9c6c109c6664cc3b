-- view, version 3: counters, for people and metrics; changes nothing.
--
-- KEYS     see book.lua
-- ARGV[1]  {names}
--
-- Returns {terms, book, refused in the last tick by pool, then of each name its terms and its
-- counters}, all msgpack, "" for absent.

local failed = load_book()
if failed then return failed end
local reply = call('HMGET', STATE, 'terms', 'book')
local refused = {}
for i = 1, #book.pools do refused[i] = call('ZCARD', denials_last_of(i - 1)) end
reply[3] = pack(refused)
for _, name in ipairs(arg.names) do
  reply[#reply + 1] = call('HGET', DEFS, name) or ''
  reply[#reply + 1] = call('HGET', ACCOUNTS, name) or ''
end
return reply
