-- cluster, version 1: the entitlements that the controller of a Kubernetes cluster publishes.
--
-- KEYS[1]  head     hash: epoch and revision of the last write; floor: whoever read less has to
--                   read all; complete: 0 while a writer goes through all; at: server's time in
--                   microseconds of which the writer's knowledge is
-- KEYS[2]  rows     hash: name -> JSON
-- KEYS[3]  changed  sorted set: names, by the revision of their last write
-- KEYS[4]  gone     sorted set: the last names that were removed, by revision
-- ARGV[1]  read or write
-- ARGV[2]  read: the revision last read; write: the writer's epoch
-- ARGV[3]  read: how many changes one call returns at most; write: how many removed names are kept
-- ARGV[4]  write: the revision that the writer knows last
-- ARGV[5]  write: first, last, both or an empty word: the place of this call among those of a
--          writer that has not written before, or lost a write; else last
-- ARGV[6]  write: age of the writer's knowledge in microseconds
-- ARGV[7]  write: how many rows follow; then their names and JSON, then the names to remove
--
-- write returns {1, revision, rows}, {0} if the writer knows another revision than the last, or
-- {-1, epoch} if a newer one wrote. read returns {epoch, revision, complete, age, 1, {rows},
-- {removed}}, with 0 and no rows where the caller has to read all, or {} if nothing was written.

local HEAD, ROWS, CHANGED, GONE = unpack(KEYS)
local call = redis.call

local function whole(number) return string.format('%.0f', number) end

local clock = call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local epoch, revision, floor, complete, at =
  unpack(call('HMGET', HEAD, 'epoch', 'revision', 'floor', 'complete', 'at'))

if ARGV[1] == 'read' then
  if not epoch then return {} end
  local since, rows, removed = ARGV[2], {}, {}
  local reply = {epoch, revision, complete, whole(math.max(0, now - at)), '0', rows, removed}
  local later = '(' .. since
  local many = call('ZCOUNT', CHANGED, later, '+inf') + call('ZCOUNT', GONE, later, '+inf')
  if tonumber(since) < tonumber(floor) or many > tonumber(ARGV[3]) then return reply end
  for i, name in ipairs(call('ZRANGEBYSCORE', CHANGED, later, '+inf')) do
    rows[i] = call('HGET', ROWS, name)
  end
  for i, name in ipairs(call('ZRANGEBYSCORE', GONE, later, '+inf')) do removed[i] = name end
  reply[5] = '1'
  return reply
end

if epoch and tonumber(epoch) > tonumber(ARGV[2]) then return {-1, epoch} end
if (revision or '0') ~= ARGV[4] then return {0} end
local place, puts = ARGV[5], tonumber(ARGV[7])
local begins = place == 'first' or place == 'both'
if begins or #ARGV > 7 then
  -- Above what any reader may know of a server that was emptied.
  revision = whole(math.max(tonumber(revision or '0') + 1, now / 1000))
end
floor = begins and revision or floor
for i = 8, 7 + 2 * puts, 2 do
  call('HSET', ROWS, ARGV[i], ARGV[i + 1])
  call('ZADD', CHANGED, revision, ARGV[i])
  call('ZREM', GONE, ARGV[i])
end
for i = 8 + 2 * puts, #ARGV do
  call('HDEL', ROWS, ARGV[i])
  call('ZREM', CHANGED, ARGV[i])
  call('ZADD', GONE, revision, ARGV[i])
end
local over = call('ZCARD', GONE) - tonumber(ARGV[3])
if over > 0 then
  local last = call('ZRANGE', GONE, over - 1, over - 1, 'WITHSCORES')[2]
  floor = whole(math.max(tonumber(floor), tonumber(last)))
  call('ZREMRANGEBYRANK', GONE, 0, over - 1)
end
if begins then complete = place == 'both' and '1' or '0' elseif place == 'last' then complete = '1' end
call('HSET', HEAD, 'epoch', ARGV[2], 'revision', revision, 'floor', floor, 'complete', complete,
  'at', whole(now - ARGV[6]))
return {1, revision, call('HLEN', ROWS)}
