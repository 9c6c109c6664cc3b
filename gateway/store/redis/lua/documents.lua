-- documents, version 1: documents that change by compare-and-set, shared by all gateways.
--
-- KEYS[1]  documents  hash: id -> VERSION OPEN blank VALUE
-- KEYS[2]  places     sorted set: ids of one tenant, by place
-- KEYS[3]  open       sorted set: open ids of all tenants, by place
-- KEYS[4]  opened     hash: tenant -> number of its open ones
-- KEYS[5]  place      number of the document created last
-- ARGV[1]  put, delete, page or oldest
-- ARGV[2]  put, delete: the tenant; page, oldest: the id before the first, or empty
-- ARGV[3]  put, delete: the id; page, oldest: how many at most
-- ARGV[4]  put, delete: the version that it is based on; 0: there is none
-- ARGV[5]  put: 1 if it is open
-- ARGV[6]  put: most open ones of the tenant; 0 for any number
-- ARGV[7]  put: the value
--
-- put and delete return the new version, -1 if the version is another, -2 if there are too many.
-- page and oldest return ids, newest or oldest first.

local DOCUMENTS, PLACES, OPEN, OPENED, PLACE = unpack(KEYS)
local call = redis.call

if ARGV[1] == 'page' or ARGV[1] == 'oldest' then
  local newest, from = ARGV[1] == 'page', 0
  if ARGV[2] ~= '' then
    from = call(newest and 'ZREVRANK' or 'ZRANK', PLACES, ARGV[2])
    if not from then return {} end
    from = from + 1
  end
  return call(newest and 'ZREVRANGE' or 'ZRANGE', PLACES, from, from + ARGV[3] - 1)
end

local tenant, id, version = ARGV[2], ARGV[3], tonumber(ARGV[4])
local kept, was_open = 0, false
local text = call('HGET', DOCUMENTS, id)
if text then
  local number, open = string.match(text, '^(%d+) ([01]) ')
  kept, was_open = tonumber(number), open == '1'
end
if kept ~= version or (ARGV[1] == 'delete' and kept == 0) then return -1 end

local opens = ARGV[1] == 'put' and ARGV[5] == '1'
local others = tonumber(call('HGET', OPENED, tenant) or '0') - (was_open and 1 or 0)
if opens and ARGV[6] ~= '0' and others >= tonumber(ARGV[6]) then return -2 end
if opens ~= was_open then
  others = others + (opens and 1 or 0)
  if others > 0 then call('HSET', OPENED, tenant, others) else call('HDEL', OPENED, tenant) end
end

if ARGV[1] == 'delete' then
  call('HDEL', DOCUMENTS, id)
  call('ZREM', PLACES, id)
  call('ZREM', OPEN, id)
  return 0
end
if kept == 0 then call('ZADD', PLACES, call('INCR', PLACE), id) end
if opens then
  call('ZADD', OPEN, call('ZSCORE', PLACES, id), id)
else
  call('ZREM', OPEN, id)
end
call('HSET', DOCUMENTS, id, string.format('%d %s ', kept + 1, ARGV[5]) .. ARGV[7])
return kept + 1
